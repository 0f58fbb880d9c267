"""A program: `agentrl proxy` whose replies do not wait for the commit, to measure what waiting costs.

    python agentrl_async.py proxy --run …

The same rows are written by the same writer. A crash would lose delivered answers, so this exists only here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentrl.cli.main import main
from agentrl.proxy.state import ProxyState
from agentrl.store.calls import interactions

durable = ProxyState.write


async def write(self: ProxyState, unit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Queue the rows of a call and go on; all other writes wait as ever."""
    if unit is interactions.begin:
        self.database.submit(unit, *args).add_done_callback(_stop_on_failure)
        return None
    if unit is interactions.finish:
        self.database.submit(unit, *args).add_done_callback(_stop_on_failure)
        return (await self.trees.get(args[1])).seq + 1  # what it will be, because agents here make one call at a time
    return await durable(self, unit, *args, **kwargs)


def _stop_on_failure(future: Future[Any]) -> None:
    if (error := future.exception()) is not None:
        print(f"a row was not written: {error!r}", file=sys.stderr)
        os._exit(1)


if __name__ == "__main__":
    ProxyState.write = write  # type: ignore[method-assign]
    main()
