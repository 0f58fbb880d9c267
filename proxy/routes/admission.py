"""Places of a run: who is refused one waits for it, and is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import RequestError
from agentrl.proxy.state import ProxyState
from agentrl.store.sessions import group_admission

T = TypeVar("T")


async def admitted(state: ProxyState, unit: Callable[..., T], *args: Any, outside: bool, **kwargs: Any) -> T:
    """`unit(conn, run_id, limits, …)`, which takes a place; `outside`: for a program that is no worker of the run.

    Raises RequestError as `sessions.admit` does.
    """
    try:
        return await state.write(unit, state.run_id, state.limits, *args, **kwargs)
    except RequestError as error:
        if error.code == group_admission.NO_CAPACITY:
            await state.write(group_admission.note_waiting, state.run_id, outside=outside)
        raise
