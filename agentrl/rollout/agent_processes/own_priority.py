"""A process lowers its own priority while an agent computes without letting the event loop run.

    TURN_S of processor time, in which the loop has not run ──► the main thread runs only when a processor is free
    the loop runs again ──► it has its priority back, unless only root may do that: then it is `slowed`

The timer counts the processor time of the process, so a process that waits, or that others keep from the processor, is
not affected. Code that computes in C is noticed when it returns to Python.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Self

TURN_S = 0.02
"""Many agents may begin to compute at one moment, and each has up to twice this before it yields."""


class OwnPriority:
    """Watches the running event loop inside `with`, in the main thread. Does nothing where Linux does not run."""

    def __init__(self) -> None:
        self.slowed = False
        self._lowered = False
        self._asked = False  # the loop has not run since the last signal
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            signal.signal(signal.SIGPROF, self._turn)
            signal.setitimer(signal.ITIMER_PROF, TURN_S, TURN_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if sys.platform == "linux":
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def _turn(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._ran)
        elif not self._lowered and not self.slowed:
            self._lowered = True
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def _ran(self) -> None:
        self._asked = False
        if self._lowered:
            self._lowered = False
            try:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            except PermissionError:
                self.slowed = True
