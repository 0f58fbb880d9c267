"""Ends sessions, for all routes that can request it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.domain.schemas import SessionStatus
from agentrl.domain.verdicts import EVERYTHING, Verdict
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.calls.answer_finder import AnswerFinder
from agentrl.proxy.calls.live_sessions import LiveSessions
from agentrl.proxy.run_store import RunStore
from agentrl.store.sessions.ends import sealing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionEnds:
    """Seals a session in the store and drops it from the caches of this process."""

    store: RunStore
    sessions: LiveSessions
    answers: AnswerFinder

    async def end(
        self,
        session_id: str,
        status: SessionStatus = SessionStatus.COMPLETED,
        error: str | None = None,
        verdict: Verdict = EVERYTHING,
        reject_group: str | None = None,
        *,
        answer: str | None = None,
        stats: Mapping[str, float] | None = None,
    ) -> str:
        """Seal a session, and stop its calls that no client waits for; returns its status.

        Raises as `sealing.end` does.
        """
        limits = self.store.limits
        result = await self.store.write(
            sealing.end, session_id, status, error, limits, verdict, reject_group, answer=answer, stats=stats
        )
        self.sessions.forget(session_id)
        await self.answers.stop_orphans()
        return result

    async def after_answer(self, session_id: str) -> None:
        """End a session whose client has received its last answer. Errors are logged: the sweep ends it later."""
        try:
            await self.end(session_id)
        except (RequestError, StoreError) as problem:
            log.error("session %s: %s", session_id, problem)
