"""Follows the task runners of a run in their scheduler, for the faults that a runner cannot write to the database.

A host that does not see the run's folder has no access to the database either: its runner refuses its input, and its
scheduler starts it again. After `max_restarts` refusals in a row the part is given up, as after as many deaths of its
command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentrl.placement.scheduler import Placement, SchedulerUnavailable
from agentrl.store import Database, part_ranks

ASK_S = 5.0
"""Seconds between questions to the scheduler."""


async def watch_runners(
    placement: Placement, database: Database, run_id: str, note: Callable[[str], None], max_restarts: int
) -> None:
    """Note once why runners ended, and give up the parts whose runners refuse their input too often. Never ends."""
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            note(line)

    while True:
        try:
            states = await asyncio.to_thread(placement.states)
        except SchedulerUnavailable as error:
            say(str(error))
            states = []
        for state in states:
            if state.state == "placed" and state.reason:
                say(f"{state.part}/{state.rank} on {state.host}: {state.reason}")
            if state.refusals > max_restarts:
                await asyncio.to_thread(database.transact, part_ranks.give_up, run_id, state.part, state.reason)
        await asyncio.sleep(ASK_S)
