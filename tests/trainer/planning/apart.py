"""Runs work in a separate process: the fake accelerator needs a process group, and a process has only one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from forks import FORKS

from agentrl.trainer.planning.fake.device_guard import compiler

LIMIT_S = 500.0


def apart(work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run `work(*arguments, answers)` in a forked process; what it sends, by name."""
    if compiler() is None:
        pytest.skip("the fake accelerator needs a C++ compiler")
    mine, its = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_run, args=(work.__module__, work.__name__, arguments, its, sys.path), daemon=True)
    process.start()
    its.close()
    found: dict[str, Any] = {}
    try:
        while mine.poll(LIMIT_S):
            name, answer = mine.recv()
            found[name] = answer
    except EOFError:
        process.join(LIMIT_S)  # it writes what it has covered
    finally:
        process.kill()
        process.join()
    return found


def _run(module: str, name: str, arguments: tuple[Any, ...], answers: Any, path: list[str]) -> None:
    sys.path[:] = path
    getattr(importlib.import_module(module), name)(*arguments, answers)
