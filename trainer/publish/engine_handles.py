"""Lets engines that share the trainer's GPUs receive a version by checkpoint-engine. Marked as not run: it needs GPUs.

    rank 0: parameter_server ─handles─► proxy ─► /update_weights_from_ipc of every engine, all at once
    others: parameter_server                                   └► each engine's rank reads from its GPU's process

Every GPU of a trainer's rank must have one rank of an engine: a process waits for it, and is killed after a time limit.
proxy/engines/tensor_transfer.py is the proxy's side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.domain.schemas import Json
from agentrl.engine.server_process import free_port
from agentrl.errors import AgentRLError

MOST_LINE = 1 << 20
"""Characters of the line with handles."""
ENDING_S = 30.0
"""Time for a process to end after the engines have answered."""
GIB = 1 << 30
MODULE = "agentrl.trainer.publish.parameter_server"


class NoHandles(AgentRLError):
    """The processes of checkpoint-engine could not start, or did not bring the tensors."""


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of one update: rank 0's listens at `host`, on the port after `port`, as the package does."""

    host: str
    port: int
    size: int
    bucket_bytes: int
    timeout_s: float


def new_group(size: int, bucket_bytes: int, timeout_s: float) -> Group:
    """A group whose rank 0 is on this host."""
    return Group(os.environ.get("MASTER_ADDR", "127.0.0.1"), free_port("0.0.0.0") - 1, size, bucket_bytes, timeout_s)


@contextmanager
def handles(group: Group, rank: int, name: str, files: Sequence[Path]) -> Iterator[Json]:
    """This rank's process; yields GPU → handle when all processes are ready for the engines. Raises NoHandles.

    At the end of the block the engines have answered; after a failure in it the process is killed.
    """
    process = _start(group, rank, name, files)
    assert process.stdin is not None
    timer = threading.Timer(group.timeout_s, process.kill)
    timer.start()
    try:
        yield _announced(process)
        process.stdin.write("\n")
        process.stdin.flush()
        if process.wait(ENDING_S) != 0:
            raise NoHandles(f"checkpoint-engine of rank {rank} ended with {process.returncode}")
    except (BrokenPipeError, subprocess.TimeoutExpired) as error:
        raise NoHandles(f"checkpoint-engine of rank {rank} did not end: {error}") from error
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def _start(group: Group, rank: int, name: str, files: Sequence[Path]) -> subprocess.Popen[str]:
    """Start a rank's process. What it logs goes to this process's log."""
    settings = {
        "RANK": rank,
        "WORLD_SIZE": group.size,
        "MASTER_ADDR": group.host,
        "MASTER_PORT": group.port,
        "PS_MAX_BUCKET_SIZE_GB": group.bucket_bytes / GIB,
    }
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, name, *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {key: str(value) for key, value in settings.items()},
    )


def _announced(process: subprocess.Popen[str]) -> Json:
    """The handles that a process prints. Raises NoHandles when it ends first."""
    assert process.stdout is not None
    line = process.stdout.readline(MOST_LINE)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        needs = "is it installed (pip install 'agentrl[checkpoint-engine]'), and has each rank a GPU?"
        raise NoHandles(f"checkpoint-engine gave no handles: {needs}")
    return found
