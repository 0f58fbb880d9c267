"""The client of SGLang's HTTP API: generate with exact token ids, update weights, pause, health.

    generate: POST /generate, server-sent events ──► Chunk, Chunk, …, Chunk(finish_reason=…)

A chunk has only new tokens, whether the server streams increments or cumulative outputs. The last chunk has the version
spans of all tokens. Missing ids, logprobs or versions raise EngineError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.engine.engine_keys import authorization
from agentrl.engine.event_stream import (
    BASE,
    LONGEST_ENGINE_MESSAGE,
    WITHOUT_WEIGHTS,
    Adapter,
    Chunk,
    ChunkReader,
    EventBuffer,
    parse_version,
)
from agentrl.engine.wire import NotConnected, Wire
from agentrl.errors import EngineDied, EngineError, EngineRejected, EngineUnavailable

__all__ = ["BASE", "Adapter", "Chunk", "EngineClient", "EngineInfo", "Health", "Memory", "PauseMode"]

PauseMode = Literal["retract", "in_place", "abort"]
ROUTING_HEADER = "X-SMG-Routing-Key"
RELEASED, RELOADING = WITHOUT_WEIGHTS
CONTROL_TIMEOUT_S = 120.0
"""How long a request other than `generate` may take."""


class Health(StrEnum):
    """The state of a server."""

    SERVING = "serving"
    PAUSED = "paused"  # alive, but holds requests; also during its start
    DEAD = "dead"  # no answer


class Memory(StrEnum):
    """What a server has in its GPU memory."""

    HELD = "held"  # weights and KV cache
    RELEASED = RELEASED  # neither; it is paused, and its weights must be loaded again
    RELOADING = RELOADING  # memory for weights, whose values are undefined, but no KV cache; it is paused


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The model and the weight version that a server reports."""

    model_path: str
    version: str  # the reported label; a decimal number on servers launched by agentrl

    @property
    def memory(self) -> Memory:
        """Whether weights are in GPU memory, read from the label: a restarted server has its first label."""
        return Memory(self.version) if self.version in WITHOUT_WEIGHTS else Memory.HELD

    @property
    def weight_version(self) -> int:
        """The label as a number. Raises EngineError for other labels, for example SGLang's `default`."""
        return parse_version(self.version)


class EngineClient:
    """A client of one server with its `key`. `http` belongs to the caller and may be shared; `close` ends
    the streams.
    """

    def __init__(
        self, url: str, http: aiohttp.ClientSession, *, key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(key)
        self._http = http
        self._timeout_s = timeout_s
        self._wire = Wire(self.url, self._headers)

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
        headers = {ROUTING_HEADER: routing_key} if routing_key is not None else {}
        where, seconds = f"{self.url}/generate", timeout_s or self._timeout_s
        events, reader, response, ended = EventBuffer(), ChunkReader(adapter), None, False
        try:
            response = await self._wire.post("/generate", orjson.dumps(body), headers, seconds)
            if response.status >= 400:
                raise _refusal(where, response.status, await response.rest())
            while data := await response.more():
                for event in events.feed(data):
                    if event == b"[DONE]":
                        continue
                    chunk = reader.read(_decode(event))
                    ended = chunk.finish_reason is not None
                    yield chunk
                    if ended:
                        return
        except EngineRejected as error:
            if adapter is not None and adapter.name in str(error):
                raise EngineUnavailable(f"{self.url} has lost adapter {adapter.name}: {error}") from error
            raise
        except TimeoutError as error:
            raise _late(where, seconds) from error
        except NotConnected as error:
            raise _failed(where, error) from error
        except OSError as error:
            raise EngineDied(f"{where} failed: {error}") from error
        finally:
            if response is not None:
                self._wire.release(response, ending=ended)
        raise EngineDied(f"{self.url} ended the stream of {rid} before its finish reason")

    def hang_up(self) -> None:
        """Close all streams of a hanging server; they raise EngineUnavailable."""
        self._wire.hang_up()

    def close(self) -> None:
        """Close all streams and connections."""
        self._wire.close()

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

    async def release_memory(self, *, cache: bool = True) -> None:
        """Free the memory of the weights, and with `cache` also that of the KV cache.

        The server must be paused and idle, else it dies; call `flush_cache` first, which is refused otherwise. Its
        weights are then undefined, and it must not continue before `resume_weights`, a load of all weights,
        `resume_cache` and `label_weights`.
        """
        await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"] if cache else ["weights"]})
        await self._relabel(RELEASED)

    async def resume_weights(self) -> None:
        """Allocate the memory of the weights again. A server that has not released it dies."""
        await self._post("/resume_memory_occupation", {"tags": ["weights"]})
        await self._relabel(RELOADING)

    async def resume_cache(self) -> None:
        """Allocate the memory of the KV cache again. A server that has not released it dies."""
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    async def update_weights_from_disk(
        self, path: Path | str, version: int | None, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load safetensors (all tensors or some) and report them as `version`; None keeps the reported label.

        Raises EngineRejected with the server's message. The loaded weights are then unknown: read `model_info`.
        """
        body = {"model_path": str(path), "weight_version": _label(version), "flush_cache": flush_cache}
        answer = await self._call("POST", "/update_weights_from_disk", body, timeout_s)
        if not answer.get("success"):
            raise EngineRejected(f"{self.url} did not load {path}: {answer.get('message')}")

    async def label_weights(self, version: int) -> None:
        """Set the version that the engine reports for its current weights."""
        await self._relabel(str(version))

    async def _relabel(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def join_group(
        self, group: str, *, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a process group as ranks `rank`, …; rank 0 listens at the given address. Returns when all members have
        joined.

        A server with several tensor ranks joins with all of them. It answers no other request meanwhile.
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._call("POST", "/init_weights_update_group", body, timeout_s)

    async def leave_group(self, group: str, timeout_s: float | None = None) -> None:
        """Leave the process group. Raises EngineRejected for an unknown name."""
        await self._call("POST", "/destroy_weights_update_group", {"group_name": group}, timeout_s)

    async def begin_update(self) -> None:
        """Begin an update by tensors. Raises EngineRejected during another update."""
        await self._post("/begin_weight_update", {})

    async def end_update(self, timeout_s: float | None = None) -> None:
        """End the update. Raises EngineRejected when there is none."""
        await self._call("POST", "/end_weight_update", {}, timeout_s)

    async def receive_tensors(
        self, group: str, bucket: Json, *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Receive tensors from rank 0 of the group: `names`, `dtypes` and `shapes` of the bucket.

        With a `version`, report it from then on. Raises EngineRejected; the weights are then unknown.
        """
        body = {**bucket, "group_name": group, "flush_cache": flush_cache, "weight_version": _label(version)}
        await self._call("POST", "/update_weights_from_distributed", body, timeout_s)

    async def take_tensors(
        self, payloads: Sequence[str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Read tensors from shared memory: their location (a base64 pickle) for each tensor rank of the server.

        With a `version`, report it from then on. Raises EngineRejected; the weights are then unknown.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "flush_cache": flush_cache,
            "weight_version": _label(version),
        }
        await self._call("POST", "/update_weights_from_tensor", body, timeout_s)

    async def tensor_ranks(self) -> int:
        """The server's number of tensor-parallel processes."""
        return int((await self._call("GET", "/server_info")).get("tp_size", 1))

    async def adapters(self) -> dict[str, str]:
        """The loaded adapters: name → folder."""
        models = (await self._call("GET", "/v1/models")).get("data", [])
        return {model["id"]: model["root"] for model in models if model.get("parent") is not None}

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """Load an adapter folder in peft's format, while requests run. Raises EngineRejected with the server's message.

        The server does not validate it: tensors of a wrong shape crash it at the adapter's first use.
        """
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter when no request uses it. Until then the server loads and unloads no other.

        Raises EngineRejected for an unknown name.
        """
        await self._post("/unload_lora_adapter", {"lora_name": name})

    async def flush_cache(self) -> None:
        """Clear the prefix cache. Raises EngineRejected while requests run."""
        await self._post("/flush_cache", {})

    async def model_info(self) -> EngineInfo:
        """The server's model and weight version."""
        info = await self._call("GET", "/model_info")
        try:
            return EngineInfo(model_path=info["model_path"], version=info["weight_version"])
        except KeyError as error:
            raise EngineError(f"{self.url}/model_info reports no {error}") from error

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of the weights in memory, by the server's names, for each rank."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in answer["ranks"]]

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

    async def _post(self, path: str, body: Json) -> Json:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Json | None = None, timeout_s: float | None = None) -> Json:
        async with self._request(method, path, body, timeout_s or CONTROL_TIMEOUT_S) as response:
            raw = await response.read()
            return _decode(raw) if response.content_type == "application/json" and raw not in (b"", b"null") else {}

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Json | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request; failures raise one of the three engine errors."""
        where = f"{self.url}{path}"
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **self._headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
        try:
            async with self._http.request(method, where, data=data, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    raise _refusal(where, response.status, await response.read())
                yield response
        except TimeoutError as error:
            raise _late(where, timeout_s) from error
        except aiohttp.ClientError as error:
            raise _failed(where, error) from error


def _label(version: int | None) -> str | None:
    return None if version is None else str(version)


def _refusal(where: str, status: int, body: bytes) -> EngineError:
    ours = status in (401, 403)  # the proxy's key is wrong, not the request
    kind = EngineError if ours or status >= 500 else EngineRejected
    message = _engine_message(body)
    raw = body.decode(errors="replace").strip()[:LONGEST_ENGINE_MESSAGE] or "no message"
    return kind(f"{where} answered {status}: {message or raw}", engine_message=message)


def _late(where: str, seconds: float) -> EngineUnavailable:
    return EngineUnavailable(f"{where} did not answer within {seconds:g} s")


def _failed(where: str, error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"{where} failed: {str(error) or type(error).__name__}")


def _decode(raw: bytes) -> Json:
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the engine sent invalid JSON: {raw[:200]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"the engine sent {type(value).__name__}, not an object")
    return value


def _engine_message(raw: bytes) -> str:
    """The message of an error in SGLang's formats {"error": "…"}, {"error": {"message": "…"}}, {"error_message": "…"}
    or {"message": "…"}; empty for other bodies.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return ""
    error = value.get("error", value) if isinstance(value, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("error_message")
    return error[:LONGEST_ENGINE_MESSAGE] if isinstance(error, str) else ""
