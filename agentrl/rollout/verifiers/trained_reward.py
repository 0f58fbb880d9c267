"""Scores a conversation with a trained reward model, which `agentrl scorer` serves."""

from __future__ import annotations

import os
from typing import Any

import httpx

from agentrl.errors import UserError

CONNECTIONS = 64
KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""Fields of a message that a reward model's chat format can show."""


class TrainedReward:
    """The reward model's number for the conversation with the answer, as `scale` × (reward − `center`).

    `url` is the address of the scorer; `key_env` names the environment variable that holds its key.
    """

    def __init__(self, url: str, key_env: str | None = None, scale: float = 1.0, center: float = 0.0) -> None:
        self.url, self.scale, self.center = url.rstrip("/"), scale, center
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
        answer = await self._http.post(f"{self.url}/score", json={"conversations": [{"messages": shown}]})
        if not answer.is_success:
            raise UserError(f"the reward model answered {answer.status_code}: {answer.text[:300]}")
        return self.scale * (float(answer.json()["rewards"][0]) - self.center)
