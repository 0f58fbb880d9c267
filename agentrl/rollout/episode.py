"""Runs one session: runs the agent with a timeout, sends its rewards, and ends the session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.client import AsyncClient, error_text
from agentrl.domain import answer_text
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, RequestError
from agentrl.rollout.agent import Agent
from agentrl.rollout.episode_stats import run_measured
from agentrl.rollout.group_filter import GroupVerdict
from agentrl.rollout.http import AgentHttp
from agentrl.rollout.score import DEFAULT_NAME, Result, Reward

ABANDON_TIMEOUT_S = 3.0


class AgentFailed(AgentRLError):
    """An agent failed in another process. The message is the error's text."""


class Places(Protocol):
    """Agents that run in other processes: each episode needs a place in one."""

    def place(self, group_id: str) -> AbstractAsyncContextManager[Agent]:
        """A place for one episode of a group, until the block ends. The episode's timeout begins with the block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an episode ended. `reward` is the sum of the returned rewards; None without rewards or after a failure."""

    session_id: str
    reward: float | None
    error: str | None


async def play(
    client: AsyncClient,
    agent: Agent | Places,
    data: Json,
    session: Json,
    *,
    http: AgentHttp,
    timeout_s: float,
    verdict: GroupVerdict | None = None,
    **extra: Any,
) -> Outcome:
    """Run `agent` on a session that the proxy opened. Cancellation abandons the session.

    `verdict` decides with the group's last episode whether the group trains.

    A reward that is rejected, or cannot be sent within the client's timeout, fails the session.
    """
    session_id = str(session["session_id"])
    result = Result()
    extra |= {"group_id": session.get("group_id") or session_id, "group_size": session.get("group_size", 1)}
    error: str | None = None
    limit: asyncio.Timeout | None = None  # None until the agent has a place
    try:
        try:
            async with _placed(agent, extra["group_id"]) as placed:
                async with asyncio.timeout(timeout_s) as limit:
                    of_session = http.extra(session["base_url"], session["api_key"])
                    result = await run_measured(placed, data, **of_session, **extra)
        except Exception as problem:  # noqa: BLE001 - an agent is foreign code: whatever it raises fails its session only
            error = str(problem) if isinstance(problem, AgentFailed) else error_text(problem)
            if limit is not None and limit.expired():
                error = f"the agent ran longer than {timeout_s:g} s"
        try:
            await _send(client, session_id, result.rewards)
        except RequestError as refused:
            error = error_text(refused)
        reject_group = None if verdict is None else await verdict.reason(result, error)
        try:  # after any error: a session that is not ended keeps its group's place as long as the worker lives
            await _end(client, session_id, result, error, reject_group)
        except RequestError as refused:
            error = error or error_text(refused)
    except asyncio.CancelledError:
        await _abandon(client, session_id)
        raise
    rewards = result.rewards if error is None else ()
    reward = sum(reward.value for reward in rewards) if rewards else None
    return Outcome(session_id=session_id, reward=reward, error=error)


def _placed(agent: Agent | Places, group_id: str) -> AbstractAsyncContextManager[Agent]:
    """Where the episode runs: in a process that has a place for it, or here."""
    return agent.place(group_id) if hasattr(agent, "place") else nullcontext(agent)


async def _send(client: AsyncClient, session_id: str, rewards: Sequence[Reward]) -> None:
    """Send the rewards. Raises RequestError at the first reward that the proxy rejects."""
    for reward in rewards:
        named = reward.name != DEFAULT_NAME
        body: Json = {"value": reward.value, "interaction_id": reward.interaction_id, "source": reward.source}
        body["name"] = reward.name if named else None
        body["idempotency_key"] = f"{session_id}:{reward.interaction_id or 'session'}" + f":{reward.name}" * named
        await client.request("POST", f"/sessions/{session_id}/reward", _without_nulls(body))


async def _end(
    client: AsyncClient, session_id: str, result: Result, error: str | None, reject_group: str | None
) -> None:
    """End the session. Raises RequestError, after failing the session, when the proxy refuses its trained tokens."""
    path, of_group = f"/sessions/{session_id}/end", _without_nulls({"reject_group": reject_group})
    if error is not None:
        await client.request("POST", path, {"status": "failed", "error": error, **of_group})
        return
    verdict = {
        "reject": result.reject,
        "trained_tokens": result.trained_tokens,
        "answer": answer_text.bounded(result.answer),
        "stats": dict(result.stats) or None,
        "truncated": result.truncated or None,
    }
    try:
        await client.request("POST", path, {"status": "completed", **_without_nulls(verdict), **of_group})
    except RequestError as refused:
        if refused.status == 422:
            await client.request("POST", path, {"status": "failed", "error": error_text(refused), **of_group})
        raise


async def _abandon(client: AsyncClient, session_id: str) -> None:
    """Abandon the session. If the request fails, the proxy does so after its timeout."""
    try:
        await client.request("DELETE", f"/sessions/{session_id}", timeout_s=ABANDON_TIMEOUT_S)
    except RequestError:
        return


def _without_nulls(body: Json) -> Json:
    return {key: value for key, value in body.items() if value is not None}
