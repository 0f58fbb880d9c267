"""`rollout.accept`: the user's function decides whether a group of episodes trains.

episodes of a group end ─► the last one ─► accept(task, rewards) ─► its end carries the reason, or nothing
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from agentrl.domain.schemas import Json
from agentrl.rollout.score import Result
from agentrl.user_code import load_function

log = logging.getLogger(__name__)
FIELD = "rollout.accept"
TIMEOUT_S = 30.0
LONGEST_REASON = 100
Accept = Callable[[Json, Sequence[float]], bool | str]
"""Gets the task and the reward of each episode that has one; returns whether they train, or the reason why not."""


def load_accept(spec: str | None) -> Accept | None:
    """The function of a config. Raises UserError when it cannot be loaded."""
    if spec is None:
        return None
    accept: Accept = load_function(spec, FIELD)
    return accept


class GroupVerdict:
    """Collects the results of a group's episodes."""

    def __init__(self, accept: Accept | None, task: Json, n_sessions: int) -> None:
        self._accept, self._task, self._left = accept, task, n_sessions
        self._rewards: list[float] = []

    async def reason(self, result: Result, error: str | None) -> str | None:
        """Why the group does not train; None while episodes are missing, and for an accepted group."""
        self._left -= 1
        if error is None and result.reject is None and result.rewards:
            self._rewards.append(sum(reward.value for reward in result.rewards))
        if self._left or self._accept is None:
            return None
        try:
            calling = asyncio.to_thread(self._accept, self._task, list(self._rewards))
            found = await asyncio.wait_for(calling, TIMEOUT_S)
        except Exception as problem:  # noqa: BLE001 - foreign code: a group that it cannot judge does not train
            log.warning("%s raised %r: the group is rejected", FIELD, problem)
            return f"{FIELD} raised {type(problem).__name__}: {problem}"[:LONGEST_REASON]
        if isinstance(found, str):
            return found[:LONGEST_REASON] or FIELD
        return None if found else FIELD
