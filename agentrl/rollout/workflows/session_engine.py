"""Samples for one episode through the proxy, so that every answer is recorded before the workflow sees it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx

from agentrl.client.requests import refusal
from agentrl.domain.schemas import Json
from agentrl.rollout.workflows.model_io import ModelRequest, ModelResponse, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A recorded answer of the episode: its id, prompt ids, output ids, and per output token logprob and version."""

    call_id: str
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What AReaL's agents read in `engine.config`."""

    request_timeout: float | None
    """Seconds that a call may take; None: no limit."""


class SessionEngine:
    """The engine of one episode. `sampled` holds its answers, oldest first; `turn_discount` is the run's."""

    def __init__(self, base_url: str, api_key: str, http: httpx.AsyncClient, turn_discount: float = 1.0) -> None:
        self.base_url, self.api_key, self.http = base_url, api_key, http
        self.turn_discount = turn_discount
        self.sampled: list[Sampled] = []
        self._before_end: list[Callable[[], Awaitable[None]]] = []

    def before_end(self, finish: Callable[[], Awaitable[None]]) -> None:
        """Call `finish` when the workflow has returned, before its episode ends."""
        self._before_end.append(finish)

    async def finish(self) -> None:
        """Finish what the workflow left open, such as streams that it did not read to their end."""
        for finish in self._before_end:
            await finish()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer. Several requests may run at the same time.

        Raises UserError for a request that cannot be kept exactly, and RequestError when the proxy refuses it.
        """
        started = time.monotonic()
        answer = await self._post(req.body())
        (choice,) = answer["choices"]
        found = Sampled(
            call_id=answer["id"],
            prompt=choice["prompt_token_ids"],
            output=choice["token_ids"],
            logprobs=choice["token_logprobs"],
            versions=[version for version, start, end in choice["weight_versions"] for _ in range(start, end)],
        )
        self.sampled.append(found)
        return ModelResponse(
            input_tokens=list(found.prompt),
            output_tokens=list(found.output),
            output_logprobs=list(found.logprobs),
            output_versions=list(found.versions),
            stop_reason=cast(StopReason, choice["finish_reason"]),
            tokenizer=req.tokenizer,
            latency=time.monotonic() - started,
            interaction_id=found.call_id,
        )

    @property
    def config(self) -> EngineSettings:
        """The settings of this worker's calls."""
        return EngineSettings(self.http.timeout.read)

    def get_version(self) -> int:
        """The newest weight version that has sampled a token of this episode; 0 before the first."""
        return max((version for one in self.sampled for version in one.versions), default=0)

    async def _post(self, body: Json) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        answer = await self.http.post(f"{self.base_url}/completions", json=body, headers=headers)
        if not answer.is_success:
            raise refusal(answer)
        return answer.json()
