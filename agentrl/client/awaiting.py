"""The asynchronous client and its sessions. `agentrl/client/blocking.py` is generated from this file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from agentrl.client.requests import (
    Retries,
    SessionState,
    Settings,
    end_body,
    error_text,
    headers_of,
    refusal,
    reward_body,
    unanswered,
)
from agentrl.domain.schemas import Json


class AsyncClient(Settings):
    """A client of the proxy. `timeout_s` limits each call, with the wait for admission."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        super().__init__(base_url, api_key, **options)
        self._http = httpx.AsyncClient(**self._http_arguments)

    async def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> Any:
        """Send a request, with retries, and return the response's JSON. `api_key` replaces the client's key.

        Raises RequestError for an error response, or after `timeout_s`.
        """
        headers = headers_of(api_key)
        retries = Retries(self.timeout_s if timeout_s is None else timeout_s, self.on_wait)
        while True:
            try:
                answer = await self._http.request(method, path, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = unanswered(error)
            else:
                if answer.is_success:
                    return answer.json()
                problem = refusal(answer)
            await asyncio.sleep(retries.pause_s(problem))

    def session(
        self,
        task: Json | None = None,
        metadata: Json | None = None,
        *,
        parent_session_id: str | None = None,
        group: str | None = None,
        group_size: int | None = None,
    ) -> AsyncSession:
        """A session, opened on entering the block, after a wait for admission, and ended on leaving it.

        All sessions with the same `group`, of any number of programs, form one group of `group_size` sessions (default:
        `rollout.group_size`) with the same task. Only the first one waits for admission. A start beyond the size raises
        RequestError `group_full`. With `parent_session_id` it is a sub-agent's session (`AsyncSession.child`), which
        needs no admission.
        """
        request = {"task": task, "metadata": metadata, "parent_session_id": parent_session_id}
        return AsyncSession(self, {**request, "group": group, "group_size": group_size})

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncSession(SessionState):
    """One agent episode, as a context manager."""

    def __init__(self, client: AsyncClient, request: Json) -> None:
        super().__init__(request)
        self._client = client

    async def _post(self, what: str, body: Json | None = None) -> Any:
        return await self._client.request("POST", f"/sessions/{self.id}/{what}", body, api_key=self.api_key)

    async def reward(
        self,
        value: float,
        interaction_id: str | None = None,
        *,
        scope: str | None = None,
        name: str = "reward",
        source: str | None = None,
        idempotency_key: str | None = None,
    ) -> bool:
        """Reward the session, or one model call by its completion id. Returns False when it is too late for training.

        `scope="branch"` limits a call's reward to the path that leads to it. Rewards of different names add up; a later
        reward of the same name, call and scope replaces the earlier one. A repeated `idempotency_key` counts once.
        """
        answer = await self._post("reward", reward_body(value, interaction_id, scope, name, source, idempotency_key))
        return bool(answer["applied"])

    async def heartbeat(self) -> bool:
        """Send a heartbeat. Returns whether the session is still open.

        Model calls count as heartbeats. An agent without calls for longer than `proxy.session_timeout_s`, for example
        in a long tool, must send heartbeats, or its session is abandoned.
        """
        answer = await self._post("heartbeat")
        return bool(answer["status"] == "open")

    def child(self, metadata: Json | None = None) -> AsyncSession:
        """A sub-agent's session under this one, with its own key, URL and rewards. It needs no admission.

        Without its own reward it inherits this session's return. It ends when this session ends, or earlier.
        """
        return self._client.session(metadata=metadata, parent_session_id=self.id)

    async def end(
        self,
        error: str | None = None,
        *,
        answer: str | float | None = None,
        stats: Mapping[str, float] | None = None,
        truncated: bool = False,
    ) -> None:
        """End the session: completed, with its `answer`, or failed with `error`. Later calls have no effect.

        `stats` are numbers of the episode, by name, whose means are metrics of the step that trains it. `truncated`
        says that a limit ended the episode, for example one of its turns, and not the task itself.
        """
        if not self.ended:
            await self._post("end", end_body(error, answer, stats, truncated=truncated))
            self.ended = True

    async def __aenter__(self) -> Self:
        self._open(await self._client.request("POST", "/sessions", self._request))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.end(None if error is None else error_text(error))
