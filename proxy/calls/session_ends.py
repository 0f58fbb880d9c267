"""The end of a session, by whatever way it is asked for."""

from __future__ import annotations

import logging

from agentrl.domain.schemas import SessionStatus
from agentrl.errors import RequestError, StoreError
from agentrl.proxy.calls import exchanges
from agentrl.proxy.state import ProxyState
from agentrl.store.sessions import sealing

log = logging.getLogger(__name__)


async def end(
    state: ProxyState, session_id: str, status: SessionStatus = SessionStatus.COMPLETED, error: str | None = None
) -> str:
    """Seal a session, and stop its calls that no client waits for; its status. Raises as `sealing.end` does."""
    result = await state.write(sealing.end, session_id, status, error, state.limits)
    state.forget(session_id)
    await exchanges.stop_orphans(state)
    return result


async def after_answer(state: ProxyState, session_id: str) -> None:
    """End a session whose last answer its client has; what goes wrong is logged, and the sweep ends it later."""
    try:
        await end(state, session_id)
    except (RequestError, StoreError) as problem:
        log.error("session %s: %s", session_id, problem)
