"""Admission of groups and sessions to the run: a caller that is refused is recorded as waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import RequestError
from agentrl.proxy.run_store import RunStore
from agentrl.store.sessions import group_admission

T = TypeVar("T")


async def admitted(store: RunStore, unit: Callable[..., T], *args: Any, outside: bool, **kwargs: Any) -> T:
    """Run `unit(conn, run_id, limits, …)`, which admits a group. `outside`: the caller is not a worker of the run.

    Raises RequestError as `group_admission.admit` does.
    """
    try:
        return await store.write(unit, store.run_id, store.limits, *args, **kwargs)
    except RequestError as error:
        if error.code == group_admission.NO_CAPACITY:
            await store.write(group_admission.note_waiting, store.run_id, outside=outside)
        raise
