"""Runs a blocking function in a thread of its own.

A thread cannot be cancelled, so one that hangs stays. A pool would fill up with such threads, and would be joined when
the process ends; these threads are bounded in number and end with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from agentrl.rollout.tools.tool_result import ToolBroken

MAX_THREADS = 1024

_running = threading.BoundedSemaphore(MAX_THREADS)


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function in a new thread. Raises ToolBroken when too many calls are running."""
    if not _running.acquire(blocking=False):
        raise ToolBroken(f"{MAX_THREADS} calls of blocking tools are running in this process")
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():  # the caller was cancelled
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = context.run(function, *args, **kwargs)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:  # a future cannot hold them
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - foreign code: whatever it raises is the caller's to handle
            failure = error
        finally:
            _running.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    try:
        threading.Thread(target=work, daemon=True, name=f"tool-{getattr(function, '__name__', 'call')}").start()
    except RuntimeError as error:
        _running.release()
        raise ToolBroken(f"no thread for a blocking tool: {error}") from None
    return await done
