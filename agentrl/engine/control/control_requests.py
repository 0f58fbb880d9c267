"""One request to an engine, other than `generate`, and what its failures are called."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from agentrl.domain.schemas import Json
from agentrl.engine.engine_keys import authorization
from agentrl.errors import EngineError, EngineKeyRefused, EngineRejected, EngineUnavailable

CONTROL_TIMEOUT_S = 120.0
"""How long a request other than `generate` may take."""
CONNECT_S = 10.0
UNAUTHORIZED, FORBIDDEN = 401, 403
LONGEST_ENGINE_MESSAGE = 500
"""Maximum characters of an engine's message to pass on."""
LONGEST_LABEL = 100
"""Maximum characters of the label of an engine's weights."""


class ControlRequests:
    """Sends requests to one server with its `key`. `http` belongs to the caller and may be shared."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._headers = authorization(key)
        self._http = http

    async def _post(self, path: str, body: Json) -> Json:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Json | None = None, timeout_s: float | None = None) -> Json:
        async with self._request(method, path, body, timeout_s or CONTROL_TIMEOUT_S) as response:
            raw = await response.read()
            return decode(raw) if response.content_type == "application/json" and raw not in (b"", b"null") else {}

    async def _context_tokens(self) -> int | None:
        """The length of the context that the list of models says."""
        return next((one.get("max_model_len") for one in await self._models() if one.get("parent") is None), None)

    async def _models(self) -> list[Json]:
        """The base model and the loaded adapters. Raises EngineError."""
        models = (await self._call("GET", "/v1/models")).get("data", [])
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise EngineError(f"{self.url}/v1/models lists no models")
        return models

    async def _adapters(self) -> dict[str, str]:
        """The loaded adapters: name → folder. Raises EngineError."""
        loaded = [(one.get("id"), one.get("root")) for one in await self._models() if one.get("parent") is not None]
        if not all(isinstance(name, str) and isinstance(folder, str) for name, folder in loaded):
            raise EngineError(f"{self.url}/v1/models lists an adapter without a name or a folder")
        return {str(name): str(folder) for name, folder in loaded}

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Json | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request; failures raise one of the three engine errors."""
        where = f"{self.url}{path}"
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **self._headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._http.request(method, where, data=data, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    raise refusal(where, response.status, await response.read())
                yield response
        except TimeoutError as error:
            raise late(where, timeout_s) from error
        except aiohttp.ClientError as error:
            raise failed(where, error) from error


def refusal(where: str, status: int, body: bytes) -> EngineError:
    """The error of a response with this status."""
    ours = status in (UNAUTHORIZED, FORBIDDEN)  # the proxy's key is wrong, not the request
    message = _engine_message(body)
    raw = body.decode(errors="replace").strip()[:LONGEST_ENGINE_MESSAGE] or "no message"
    text = f"{where} answered {status}: {message or raw}"
    if status == UNAUTHORIZED:
        return EngineKeyRefused(text, engine_message=message)
    if ours or status >= 500:
        return EngineError(text, engine_message=message)
    return EngineRejected(text, engine_message=message, status=status)


def late(where: str, seconds: float) -> EngineUnavailable:
    """The error of a request without an answer in time."""
    return EngineUnavailable(f"{where} did not answer within {seconds:g} s")


def failed(where: str, error: Exception) -> EngineUnavailable:
    """The error of a connection that failed."""
    return EngineUnavailable(f"{where} failed: {str(error) or type(error).__name__}")


def decode(raw: bytes) -> Json:
    """A JSON object of an engine. Raises EngineError for anything else."""
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the engine sent invalid JSON: {raw[:200]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"the engine sent {type(value).__name__}, not an object")
    return value


def weight_label(where: str, answer: Json) -> str:
    """The label of the weights in an engine's answer. Raises EngineError for anything but a short string."""
    label = answer.get("weight_version")
    if not isinstance(label, str) or len(label) > LONGEST_LABEL:
        raise EngineError(f"{where} reports no weight version: {label!r:.{LONGEST_LABEL}}")
    return label


def rank_digests(where: str, ranks: Any) -> list[dict[str, str]]:
    """Digests of the weights for each rank of an engine, by name. Raises EngineError for anything else."""
    try:
        return [{str(name): str(digest) for name, digest in rank.items()} for rank in ranks]
    except (TypeError, AttributeError) as error:
        raise EngineError(f"{where} reports no digests") from error


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
