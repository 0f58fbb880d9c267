"""Processes that are forked from one that has imported PyTorch, transformers and agentrl.

Importing these takes a process seconds of a core, forking a hundredth of one. The process that is forked from starts
with the first fork, and ends with the process of the test session that uses it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ("torch", "torch.distributed.tensor.parallel", "transformers", "peft", "agentrl.trainer.loop")
FORKS.set_forkserver_preload([*IMPORTED, "agentrl.proxy.app", "agentrl.cli.main"])


class Command:
    """`agentrl ARGUMENTS` in a process of its own, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], folder: Path | None = None) -> None:
        (out, its_out), (err, its_err) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(
            target=_command, args=(arguments, dict(env), str(folder or Path.cwd()), its_out, its_err), daemon=True
        )
        self._process.start()
        its_out.close()
        its_err.close()
        self.stdout, self._stderr = _reader(out), _reader(err)

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended, as with subprocess.Popen
            os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read the rest of stdout and stderr after the process has ended."""
        with ThreadPoolExecutor(1) as pool, self.stdout, self._stderr:
            errors = pool.submit(self._stderr.read)
            said = self.stdout.read(), errors.result(timeout)
        self._process.join(timeout)
        assert self.returncode is not None, "the process goes on without stdout and stderr"
        return said


def _reader(end: Connection) -> TextIO:
    file = os.fdopen(os.dup(end.fileno()))
    end.close()
    return file


def _command(arguments: list[str], env: dict[str, str], folder: str, out: Connection, err: Connection) -> None:
    """Run in the forked process."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for end, number in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["agentrl", *arguments]
    from agentrl.cli.main import main

    main()


def ran(arguments: list[str], env: Mapping[str, str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`agentrl ARGUMENTS`, to its end."""
    command = Command(arguments, env, folder)
    out, err = command.communicate(timeout=120)
    assert command.returncode is not None
    return subprocess.CompletedProcess(["agentrl", *arguments], command.returncode, out, err)
