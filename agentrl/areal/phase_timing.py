"""AReaL's decorators around the phases of an episode: here they measure seconds, as `time/PHASE` in `stats_tracker`."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from agentrl.areal import stats_tracker
from agentrl.rollout.workflows.workflow_context import stat_scope

P = ParamSpec("P")
T = TypeVar("T")
EPISODE = "episode"


@asynccontextmanager
async def atrace_session_phase(phase: str) -> AsyncIterator[None]:
    """Measure a block."""
    started = time.monotonic()
    try:
        yield
    finally:
        stats_tracker.get(stat_scope()).scalar(**{f"time/{phase}": time.monotonic() - started})


def trace_session(phase: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Measure every call of an `async def` function."""

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(function)
        async def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            async with atrace_session_phase(phase):
                return await function(*args, **kwargs)

        return measured

    return decorate


def session_context() -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Measure every call of the function that collects one sample, as the phase `episode`."""
    return trace_session(EPISODE)
