"""A program: `agentrl proxy` whose replies do not wait for the commit, to measure the cost of waiting.

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
from agentrl.proxy.calls.token_tree import TreeCache
from agentrl.proxy.run_store import RunStore
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.calls.call_tree import Node

durable = RunStore.write
add = TreeCache.commit


async def write(self: RunStore, unit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Queue the rows of a call without waiting for the commit; all other writes wait."""
    if unit is call_intents.begin:
        self.database.submit(unit, *args).add_done_callback(_stop_on_failure)
        return None
    if unit is call_outcomes.finish:
        self.database.submit(unit, *args).add_done_callback(_stop_on_failure)
        return None
    return await durable(self, unit, *args, **kwargs)


def commit(self: TreeCache, session_id: str, seq: int | None, node: Node | None) -> None:
    """A call without a number from the store gets the next number: agents here make one call at a time."""
    tree = self._trees.get(session_id)
    if tree is not None:
        add(self, session_id, tree.seq + 1 if seq is None else seq, node)


def _stop_on_failure(future: Future[Any]) -> None:
    if (error := future.exception()) is not None:
        print(f"a row was not written: {error!r}", file=sys.stderr)
        os._exit(1)


if __name__ == "__main__":
    RunStore.write = write  # type: ignore[method-assign]
    TreeCache.commit = commit  # type: ignore[method-assign]
    main()
