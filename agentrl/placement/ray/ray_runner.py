"""The Ray actor of a rank: starts its task runner behind a guard, and again until it ends with status 0.

    actor (a Ray worker) ──► guard ──► agentrl task ──► guard ──► the rank's command

Ray starts the actor again when its worker or its node is lost, and the guard ends the runner of the lost one. Nothing
here imports Ray or anything else that is large, except inside the worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from agentrl.own_address import ADDRESS
from agentrl.placement.hosts import VISIBLE_GPUS
from agentrl.processes import children
from agentrl.processes.restarts import USER_ERROR_STATUS, Backoff

PYTHON = "{python}"
"""A word of the command that stands for the Python interpreter of the worker."""
STDERR = 2
RUNNER_GRACE_S = 15.0
"""How long a task runner has, beyond its command's grace, to end and to release its lease."""


class RayRunner:
    """Keeps one task runner running. A class for `ray.remote`."""

    def __init__(self, command: Sequence[str], gpus: int, grace_s: float) -> None:
        self._command = [sys.executable if word == PYTHON else word for word in command]
        self._gpus = gpus
        self._grace_s = grace_s + RUNNER_GRACE_S
        self._ended = False
        self._last = ""
        self._refusals = 0
        threading.Thread(target=self._keep_running, daemon=True).start()

    def state(self) -> tuple[bool, str, str, int]:
        """Whether the runner ended with status 0, the host, how it ended last if it did otherwise, and how often in a
        row it refused its input.
        """
        return self._ended, socket.gethostname(), self._last, self._refusals

    def _keep_running(self) -> None:
        backoff = Backoff()
        env = runner_env(os.environ, _ray_address(), self._gpus)
        while not self._ended:
            started = time.monotonic()
            try:
                self._has_ended(*self._run(env))
            except OSError as error:  # no memory, or no room for another process
                self._last = f"its runner cannot start: {error}"
            if not self._ended:
                time.sleep(backoff.after(time.monotonic() - started))

    def _has_ended(self, status: int, last_line: str) -> None:
        self._refusals = self._refusals + 1 if status == USER_ERROR_STATUS else 0
        if self._refusals:
            self._last = last_line.removeprefix("agentrl: ")
        else:
            self._last = f"its runner ended with status {status}: {last_line}".rstrip(": ") if status else ""
        self._ended = status == 0

    def _run(self, env: Mapping[str, str]) -> tuple[int, str]:
        """Run the runner to its end; its exit status, and the last line of its output, which goes on to Ray's log."""
        last_line = b""
        readable, written = os.pipe()
        with open(readable, "rb") as output:
            with open(written, "wb") as end:
                process = children.start_blocking(self._command, env=env, output=end)
            with process:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the guard was killed at once
                    process.stdin.write(f"{self._grace_s}".encode())  # how long the runner has when this worker dies
                    process.stdin.flush()
                for line in output:
                    os.write(STDERR, line)
                    last_line = line.strip() or last_line
                return process.wait(), last_line.decode(errors="replace")


def runner_env(env: Mapping[str, str], address: str, gpus: int) -> dict[str, str]:
    """The environment of a task runner: without GPUs if it needs none (Ray hides none), and with Ray's address for
    this host unless the host's own environment sets one."""
    return {ADDRESS: address, **env} | ({} if gpus else {VISIBLE_GPUS: ""})


def _ray_address() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())
