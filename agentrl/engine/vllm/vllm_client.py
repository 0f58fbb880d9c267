"""The client of vLLM's HTTP API: generate with exact token ids, pause, health; the weights' routes are in
`vllm_weights.py`.

    generate: POST /inference/v1/generate, server-sent events ──► Chunk, Chunk, …, Chunk(finish_reason=…)

A server that agentrl started (`keyed_vllm.py`) has routes of its own beside vLLM's, and says at `PROMISES` what it can
do. Another one is sampled from, paused and labelled by vLLM's routes, which need `VLLM_SERVER_DEV_MODE=1` and
`--enable-scale-out`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import StrEnum
from functools import partial

import orjson

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.engine.chunks import Adapter, Chunk
from agentrl.engine.control.answer_streams import AnswerStreams
from agentrl.engine.control.control_requests import decode, refusal
from agentrl.engine.engine_client import Capability, Health, PauseMode, ServerFacts
from agentrl.engine.event_buffer import DONE
from agentrl.engine.vllm.vllm_events import AnswerReader, refused
from agentrl.engine.vllm.vllm_params import has_grammar, is_restricted, translated
from agentrl.engine.vllm.vllm_paths import ABORT, ABORT_ANY, GENERATE, NOT_FOUND, PROMISES, READY
from agentrl.engine.vllm.vllm_weights import OURS, WeightRoutes
from agentrl.errors import EngineDied, EngineError, EngineRejected, EngineUnavailable


class Logprobs(StrEnum):
    """The distribution of a server's logprobs."""

    FULL = "full"  # the whole distribution, after temperature, biases, penalties and grammars
    RESTRICTED = "restricted"  # what top-p, top-k and min-p leave of it
    RAW = "raw"  # the model's own distribution


class VLLMClient(AnswerStreams, WeightRoutes):
    """A client of one server with its `key`. `http` belongs to the caller and may be shared; `close` ends the
    streams.
    """

    backend = "vllm"
    _logprobs: Logprobs | None = None  # None until it was asked

    async def generate(
        self,
        *,
        rid: str,
        input_ids: Sequence[int],
        sampling_params: Json,
        routing_key: str | None = None,
        timeout_s: float | None = None,
        top_logprobs: int = 0,
        adapter: Adapter | None = None,
        cache_key: str | None = None,
        experts_from: int | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Sample with base weights or an `adapter`; yields chunks until one has a finish reason.

        `timeout_s` limits the whole call, pauses included. Closing the generator closes the connection, upon which the
        server aborts the request. Requests share the prefix cache of requests with the same `cache_key`. No experts
        are reported. Raises EngineUnavailable when the server has lost the adapter, EngineDied when the connection or
        the server's core breaks.
        """
        body = _body(rid, input_ids, translated(sampling_params, top_logprobs))
        if adapter is not None:
            body["model"] = adapter.name
        if cache_key is not None:
            body["cache_salt"] = cache_key
        await self._check_meaning(sampling_params)
        bound = has_grammar(sampling_params)
        reader = AnswerReader(adapter, bound=bound)

        def read(event: bytes) -> Chunk | None:
            return reader.end() if event == DONE else reader.read(decode(event))

        refused_by = partial(_refusal, adapter=adapter, bound=bound)
        stream = self._chunks(
            GENERATE, body, read, rid=rid, routing_key=routing_key, timeout_s=timeout_s, refused=refused_by
        )
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    async def capabilities(self) -> frozenset[Capability]:
        """The abilities of the server. Raises EngineUnavailable without an answer."""
        try:
            promises = (await self._call("GET", PROMISES)).get("capabilities", [])
        except EngineRejected as error:
            if error.status != NOT_FOUND:
                raise
            return await self._stock_capabilities()
        known = {capability.value: capability for capability in Capability}
        return frozenset(known[name] for name in promises if name in known)

    async def _stock_capabilities(self) -> frozenset[Capability]:
        """The abilities of a server that agentrl did not start, judged by its routes."""
        paths = (await self._call("GET", "/openapi.json")).get("paths", {})
        routes = {"/pause": Capability.PAUSES, "/v1/load_lora_adapter": Capability.ADAPTERS}
        return frozenset({Capability.GRAMMARS, *(can for path, can in routes.items() if path in paths)})

    async def _check_meaning(self, params: Json) -> None:
        """Refuse what would get logprobs of another distribution: those of vLLM itself are of what top-p, top-k and
        min-p leave, and without `--logprobs-mode processed_logprobs` they have no temperature and no biases.
        """
        if self._logprobs is None:
            self._logprobs = await self._meaning()
        if self._logprobs is Logprobs.RAW:
            raise EngineError(f"{self.url} needs --logprobs-mode processed_logprobs, or {OURS}")
        if self._logprobs is Logprobs.RESTRICTED and is_restricted(params):
            said = "top_p, top_k and min_p need an engine that was started by agentrl"
            raise EngineRejected(f"{self.url} refused: {said}", engine_message=said)

    async def _meaning(self) -> Logprobs:
        if Capability.FULL_LOGPROBS in await self.capabilities():
            return Logprobs.FULL
        info = await self._call("GET", "/server_info?config_format=json")
        mode = (info.get("vllm_config") or {}).get("model_config", {}).get("logprobs_mode")
        return Logprobs.RESTRICTED if mode == "processed_logprobs" else Logprobs.RAW

    async def server_facts(self) -> ServerFacts:
        """The server's release and limits. Raises EngineRejected when a server of another kind answers."""
        release = (await self._call("GET", "/version")).get("version")
        if not isinstance(release, str):
            raise EngineRejected(f"{self.url}/version does not answer as vLLM")
        return ServerFacts(release=release, context_tokens=await self._context_tokens())

    async def abort(self, rid: str) -> None:
        """Stop a request; its stream ends with finish reason `abort`. Unknown ids are ignored."""
        await self._post(ABORT, {"request_ids": [f"generate-tokens-{rid}"]})

    async def abort_all(self) -> None:
        """Stop all requests of all clients."""
        await self._post(ABORT_ANY, {})

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Hold all requests. `retract` clears the cache, `in_place` keeps it, `abort` ends the requests."""
        how = "abort" if mode == "abort" else "keep"
        await self._post(f"/pause?mode={how}&clear_cache=false", {})
        if mode == "retract" and not await self._cleared(running=True):
            raise EngineError(f"{self.url} kept its prefix cache")

    async def continue_generation(self) -> None:
        """Undo `pause`. Has no effect on a server that is not paused."""
        await self._post("/resume", {})

    async def paused(self, timeout_s: float = 10.0) -> bool:
        """Whether the server holds requests because it is paused or starting.

        Raises EngineUnavailable without an answer, and when the server's core has died.
        """
        try:
            return await self._is_paused(READY, timeout_s)
        except EngineRejected as error:
            if error.status != NOT_FOUND:
                raise
        return await self._is_paused("/is_paused", timeout_s)  # which the core answers, between two steps

    async def _is_paused(self, path: str, timeout_s: float) -> bool:
        try:
            return bool((await self._call("GET", path, None, timeout_s)).get("is_paused"))
        except (EngineUnavailable, EngineRejected):
            raise
        except EngineError as error:  # a 5xx
            raise EngineDied(f"the core of {self.url} has died: {error}") from error

    async def health(self, timeout_s: float = 10.0) -> Health:
        """Whether the server is serving, paused or dead. Does not involve the model, so it is fast under load."""
        try:
            return Health.PAUSED if await self.paused(timeout_s) else Health.SERVING
        except EngineUnavailable:
            return Health.DEAD

    async def follows(self, timeout_s: float = 10.0) -> bool:
        """Whether the server's processes are up."""
        try:
            async with self._request("GET", "/health", None, timeout_s):
                return True
        except EngineError:
            return False


def _body(rid: str, input_ids: Sequence[int], params: Json) -> Json:
    ids = input_ids if isinstance(input_ids, TokenIds) else TokenIds(input_ids)
    return {
        "request_id": rid,
        "token_ids": orjson.Fragment(ids.json()),
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _refusal(where: str, status: int, body: bytes, adapter: Adapter | None, *, bound: bool) -> EngineError:
    """The error of a request that was refused with this status."""
    error = refusal(where, status, body)
    if not isinstance(error, EngineRejected):
        return error
    message = error.engine_message
    if adapter is not None and status == NOT_FOUND and adapter.name in message:
        return EngineUnavailable(f"{where} has lost adapter {adapter.name}: {message}")
    return refused(str(error), message, status, bound=bound)
