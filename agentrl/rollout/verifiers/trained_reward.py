"""Scores a conversation with a trained reward model, which `agentrl scorer` serves."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx

from agentrl.environment import SCORERS
from agentrl.errors import UserError
from agentrl.rollout.rewards.function_call import Unusable

CONNECTIONS = 64
PAUSE_S = 0.5
"""Between two attempts to reach a scorer that starts."""
KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""Fields of a message that a reward model's chat format can show."""


class TrainedReward:
    """The reward model's number for the conversation with the answer, as `scale` × (reward − `center`).

    `url` is the address of a scorer; `key_env` names the environment variable that holds its key. `model` is a folder
    instead, for which the run starts a scorer. A scorer that cannot be reached is awaited until the call's timeout.
    """

    def __init__(
        self,
        url: str | None = None,
        key_env: str | None = None,
        scale: float = 1.0,
        center: float = 0.0,
        model: str | None = None,
    ) -> None:
        if (url is None) == (model is None):
            raise UserError("give either `url`, the address of a scorer, or `model`, the folder of a reward model")
        self.url, self.model, self.scale, self.center = url, model, scale, center
        key = os.environ.get(key_env) if key_env is not None else None
        if key_env is not None and not key:
            raise UserError(f"key_env: the environment variable {key_env} is not set")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: httpx.AsyncClient | None = None

    async def __call__(self, messages: list[dict[str, Any]]) -> float:
        """Ask the scorer."""
        limits = httpx.Limits(max_connections=CONNECTIONS)
        self._http = self._http or httpx.AsyncClient(timeout=None, limits=limits, headers=self._headers)
        shown = [{name: message[name] for name in KNOWN if message.get(name) is not None} for message in messages]
        answer = await self._posted(self._http, {"conversations": [{"messages": shown}]})
        if not answer.is_success:
            raise UserError(f"the reward model answered {answer.status_code}: {answer.text[:300]}")
        return self.scale * (float(answer.json()["rewards"][0]) - self.center)

    async def _posted(self, http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """The scorer's answer, as soon as there is a scorer."""
        url = self.address()
        while True:
            try:
                return await http.post(f"{url}/score", json=body)
            except httpx.ConnectError:
                await asyncio.sleep(PAUSE_S)

    def address(self) -> str:
        """The scorer's. Raises Unusable where the run has started none."""
        if self.url is not None:
            return self.url.rstrip("/")
        started = json.loads(os.environ.get(SCORERS, "{}"))
        if self.model not in started:
            raise Unusable(f"model: no scorer runs for {self.model}: `agentrl train` starts one; elsewhere give `url`")
        return str(started[self.model])
