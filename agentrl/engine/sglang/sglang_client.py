"""The client of SGLang's HTTP API: generate with exact token ids, pause, health; the controls of `control/`.

    generate: POST /generate, server-sent events ──► Chunk, Chunk, …, Chunk(finish_reason=…)

A chunk has only new tokens, whether the server streams increments or cumulative outputs. The last chunk has the version
spans of all tokens. Missing ids, logprobs or versions raise EngineError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import orjson

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.engine.chunks import Adapter, Chunk
from agentrl.engine.control.answer_streams import AnswerStreams
from agentrl.engine.control.control_requests import decode
from agentrl.engine.control.prepared_controls import PreparedControls
from agentrl.engine.engine_client import Capability, Health, PauseMode, ServerFacts
from agentrl.engine.event_buffer import DONE
from agentrl.engine.sampling_params import NAMES
from agentrl.engine.sglang.sglang_events import ChunkReader
from agentrl.engine.sglang.weight_controls import WeightControls
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable


class SGLangClient(AnswerStreams, WeightControls, PreparedControls):
    """A client of one server with its `key`. `http` belongs to the caller and may be shared; `close` ends
    the streams.
    """

    backend = "sglang"

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

        `rid` must be unique and of fixed length, because the server aborts by prefix. Closing the generator closes the
        connection, upon which the server aborts the request. `timeout_s` limits the whole call, pauses included. Raises
        EngineUnavailable when the server has lost the adapter, EngineDied when the connection breaks. Requests share
        the prefix cache of requests with the same `cache_key`.

        With `experts_from`, at most the prompt's length, the last chunk has the experts that the model chose from that
        position on: (prompt + output − 1 − experts_from, layers, top_k). A server that was started without
        `--enable-return-routed-experts` reports none, and neither does a request that ends in the queue.
        """
        if unknown := sorted(sampling_params.keys() - NAMES):
            said = f"{unknown[0]} is not supported"
            raise EngineRejected(f"{self.url} gets no parameter {unknown[0]}", engine_message=said)
        ids = input_ids if isinstance(input_ids, TokenIds) else TokenIds(input_ids)
        body: Json = {
            "rid": rid,
            "input_ids": orjson.Fragment(ids.json()),
            "sampling_params": sampling_params,
            "return_logprob": True,
            "stream": True,
        }
        if top_logprobs:
            body["top_logprobs_num"] = top_logprobs
        if adapter is not None:
            body["lora_path"] = adapter.name
        if cache_key is not None:
            body["extra_key"] = cache_key
        if experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        reader = ChunkReader(adapter)

        def read(event: bytes) -> Chunk | None:
            return None if event == DONE else reader.read(decode(event))

        try:
            stream = self._chunks("/generate", body, read, rid=rid, routing_key=routing_key, timeout_s=timeout_s)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineRejected as error:
            if adapter is not None and adapter.name in str(error):
                raise EngineUnavailable(f"{self.url} has lost adapter {adapter.name}: {error}") from error
            raise

    async def capabilities(self) -> frozenset[Capability]:
        """The abilities of the server. Raises EngineUnavailable without an answer."""
        info = await self._call("GET", "/server_info")
        found = {
            Capability.WEIGHTS,
            Capability.FULL_LOGPROBS,
            Capability.GRAMMARS,
            Capability.PAUSES,
            Capability.DIGESTS,
            Capability.TENSORS,
            Capability.HANDLES,
        }
        options = {
            "enable_lora": Capability.ADAPTERS,
            "enable_memory_saver": Capability.MEMORY,
            "enable_return_routed_experts": Capability.EXPERTS,
        }
        found |= {capability for name, capability in options.items() if info.get(name)}
        if await self.preparation() is not None:
            found.add(Capability.PREPARATION)
        return frozenset(found)

    async def server_facts(self) -> ServerFacts:
        """The server's release and limits. Raises EngineRejected when a server of another kind answers."""
        release = (await self._call("GET", "/server_info")).get("version")
        if not isinstance(release, str):
            raise EngineRejected(f"{self.url}/server_info does not answer as SGLang")
        return ServerFacts(release=release, context_tokens=await self._context_tokens())

    async def abort(self, rid: str) -> None:
        """Stop a request; its stream ends with finish reason `abort`. Unknown ids are ignored."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """Stop all requests of all clients."""
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Hold all requests. `retract` allows a cache flush, `in_place` keeps the cache, `abort` ends the requests."""
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Undo `pause`. Has no effect on a server that is not paused."""
        await self._post("/continue_generation", {})

    async def paused(self, timeout_s: float = 10.0) -> bool:
        """Whether the server holds requests because it is paused or starting.

        Raises EngineUnavailable without an answer, EngineRejected for servers before SGLang 0.5.23.
        """
        try:
            async with self._request("GET", "/ready", None, timeout_s):
                return False
        except (EngineUnavailable, EngineRejected):
            raise
        except EngineError:  # 503
            return True

    async def health(self, timeout_s: float = 10.0) -> Health:
        """Whether the server is serving, paused or dead. Does not involve the model, so it is fast under load."""
        try:
            return Health.PAUSED if await self.paused(timeout_s) else Health.SERVING
        except EngineUnavailable:
            return Health.DEAD

    async def follows(self, timeout_s: float = 10.0) -> bool:
        """Whether the server's processes on a host other than its first are up. That host serves nothing but this."""
        try:
            async with self._request("GET", "/health", None, timeout_s):
                return True
        except EngineUnavailable:
            return False
