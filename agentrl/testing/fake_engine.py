"""A scriptable inference engine for tests: SGLang's HTTP API on a real socket, without a model.

    with FakeEngine() as engine:
        engine.enqueue(Reply([5, 6, 2], chunks=[1, 2]))
        ...                                   # point an EngineClient, a proxy, … at engine.url
        assert engine.requests[0]["input_ids"] == [...]

    replies.py         what a test scripts, and the events of one reply
    fake_controls.py   pauses, aborts, weight updates, adapters
    fake_preparation.py   prepared versions, for an engine with a `cache`
    server_thread.py   the socket
    fake_engine.py     /generate, and the public class

Queued replies are given in order. When the queue is empty, `respond(input_ids, sampling_params)` answers; by default
it is a fixed function of the prompt. A request that samples nothing gets the logprobs of its tokens from `score`.
Pauses, aborts and weight updates act on running replies as they do in SGLang, so version spans are right. Nothing
depends on time: `Reply.hold_after` and `release` let a test act at an exact token.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from agentrl.domain.experts.routed_experts import RoutingShape
from agentrl.domain.schemas import Json
from agentrl.engine.control.preparation import VERSIONS
from agentrl.engine.prepared.asgi_bodies import MOST_BYTES
from agentrl.engine.prepared.prepared_routes import PATHS, REPLACING, answer
from agentrl.engine.prepared.preparer import Preparer
from agentrl.engine.prepared.version_host import VersionHost
from agentrl.testing.fake_controls import Control, Controls
from agentrl.testing.fake_preparation import FakeStager, serve_asgi
from agentrl.testing.replies import Reply, Respond, RunningReply, Score, fixed_answer, fixed_scores, scored
from agentrl.testing.server_thread import ServerThread
from agentrl.versions.version_cache import VersionCache

RELEASE = "0.5.23"
"""The release of SGLang that it imitates."""


class FakeEngine(Controls):
    """Serves inside `with`, or from `start()` to `stop()`, in a thread, on 127.0.0.1.

    Attributes for tests to read, in the order of arrival: `requests` (bodies of `/generate`), `headers` (of the same),
    `calls` (every other POST as (path, body)), `disconnected` (request ids whose client went away). `running` holds the
    ids of running requests; `holding` counts the replies that wait at their `hold_after`. `server_release` is the
    release that it reports, which a test may set.
    """

    def __init__(
        self,
        respond: Respond = fixed_answer,
        *,
        version: int = 0,
        model_path: str = "fake",
        context_length: int = 8192,
        vocab_size: int | None = None,
        cumulative: bool = False,
        takes_adapters: bool = True,
        key: str | None = None,
        token_delay_s: float = 0.0,
        routing: RoutingShape | None = None,
        port: int = 0,
        cache: Path | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        super().__init__(
            version=version, model_path=model_path, takes_adapters=takes_adapters, reads_content=cache is not None
        )
        self.respond = respond
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.cumulative = cumulative
        self.key = key
        self.token_delay_s = token_delay_s
        self.score: Score = fixed_scores  # the logprobs of given tokens, for requests that sample nothing
        self.text_of: Callable[[int], str] = str  # the text of a token in their answers
        self.routing = routing  # report the experts of a mixture of this shape to requests that ask for them
        self.requests: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.calls: list[tuple[str, Json]] = []
        self.disconnected: list[str] = []
        self.holding = 0
        self.server_release = RELEASE
        self.stager = FakeStager(self)
        self._host = None if cache is None else VersionHost(VersionCache(cache, cache_bytes), key)
        self._preparer: Preparer | None = None
        self._replies: deque[Reply] = deque()
        self._released = 0
        self._server = ServerThread(port)

    # -- for tests -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address of the server; the same after `stop` and `start`."""
        assert self._server.port, "the fake engine has not been started"
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def port(self) -> int:
        """Port of the server; 0 before its first start, unless one was given."""
        return self._server.port

    def enqueue(self, *replies: Reply | Sequence[int]) -> None:
        """Give these replies to the next requests; a plain list of ids is a Reply."""
        self._replies.extend(reply if isinstance(reply, Reply) else Reply(reply) for reply in replies)

    def release(self) -> None:
        """Let one reply continue past its `hold_after`: one that waits there, or the next that arrives."""
        self._released += 1
        self._server.call(self._notify())

    def clear(self) -> None:
        """Drop queued replies and releases, and forget all requests, for a test that uses the engine of another."""
        self._replies.clear()
        self._released = 0
        for seen in (self.requests, self.headers, self.calls, self.disconnected):
            seen.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, for example `lambda: engine.holding == 1`; fails after 10 s."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  the engine lives in another thread
                await asyncio.sleep(0.001)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Serve the base weights, unpaused, as a restarted engine does."""
        self._reset()
        self._server.start(self._app())
        return self

    def stop(self) -> None:
        """Die at once; running replies are cut off."""
        if self._preparer is not None:
            self._preparer.forget()  # ends the thread that fetches
        self._server.stop()

    # -- the server ------------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[self._key_required])
        self._add_routes(app)
        return app

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._server_info)
        for path, control in self._controls().items():
            app.router.add_post(path, self._recorded(path, control))
        if self._host is not None:
            self._preparer = Preparer(self._host.fetch, self.stager)
            for path in PATHS:
                app.router.add_route("*", path, self._prepared)
            app.router.add_get(f"{VERSIONS}{{name}}/{{file}}", self._version_file)

    @web.middleware
    async def _key_required(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.key is None or self._is_open(request.path) or given == f"Bearer {self.key}":
            return await handler(request)
        return as_json({"error": {"message": "this engine needs its key", "code": 401}}, 401)

    def _is_open(self, path: str) -> bool:
        """Whether a path needs no key."""
        return path in ("/health", "/ready") or path.startswith(VERSIONS)

    def _recorded(self, path: str, control: Control) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            body = orjson.loads(await request.read() or b"{}")
            self.calls.append((path, body))
            if self._preparer is not None and path in REPLACING:
                self._preparer.forget()
            status, answer = await control(body)
            await self._notify()
            return as_json(answer, status)

        return handler

    async def _prepared(self, request: web.Request) -> web.Response:
        assert self._preparer is not None
        body = await request.read()
        found = await answer(self._preparer, request.method, request.path, body[:MOST_BYTES])
        if request.method == "POST":
            self.calls.append((request.path, orjson.loads(body) if found.status < 300 else {}))
        return as_json(found.body, found.status)

    async def _version_file(self, request: web.Request) -> web.StreamResponse:
        assert self._host is not None
        return await serve_asgi(self._host.files, request)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return as_json({"model_path": self.model_path, "weight_version": str(self.version)})

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": self.model_path, "root": self.model_path, "parent": None, "max_model_len": self.context_length}
        loaded = [{"id": name, "root": path, "parent": self.model_path} for name, path in self.adapters.items()]
        return as_json({"object": "list", "data": [base, *loaded]})

    async def _server_info(self, request: web.Request) -> web.Response:
        return as_json({"tp_size": 1, "version": self.server_release})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self._dies_of(body):
            await self._die()
        reply = self._replies.popleft() if self._replies else self._default_reply(body)
        if reply.status is not None:
            return as_json({"error": {"message": reply.error or "scripted failure"}}, reply.status)
        if body.get("stream") is False:
            return as_json(scored(body, self.score(body["input_ids"]), self.text_of))
        rid, adapter = body["rid"], body.get("lora_path")
        if adapter is not None and (problem := await self._name_adapter(rid, adapter)) is not None:
            reply = Reply(error=problem)
        return await self._answer(request, body, reply)

    async def _answer(self, request: web.Request, body: Json, reply: Reply) -> web.StreamResponse:
        """Stream a reply to a request whose `body` is in SGLang's words."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        rid = body["rid"]
        self.running.add(rid)
        try:
            await self._stream(request, response, rid, body, reply)
        except asyncio.CancelledError:
            self.disconnected.append(rid)
            raise
        finally:
            self.running.discard(rid)
            self._aborted.discard(rid)
            self.retractions.pop(rid, None)
            self._in_use.pop(rid, None)
            await self._notify()
        return response

    async def _die(self) -> None:
        self.stop()
        await asyncio.sleep(3600)

    def _dies_of(self, body: Json) -> bool:
        """Whether a request kills the server: unknown token ids and a top_k above 31 bits kill SGLang."""
        unknown = self.vocab_size is not None and not all(0 <= i < self.vocab_size for i in body["input_ids"])
        return unknown or body["sampling_params"].get("top_k", 0) >= 2**31

    def _default_reply(self, body: Json) -> Reply:
        if len(body["input_ids"]) >= self.context_length:
            n = len(body["input_ids"])
            return Reply(error=f"The input ({n} tokens) is longer than the model's context length.")
        if not _compiles(body["sampling_params"]):
            return Reply(error="Failed to compile the grammar")
        return Reply(self.respond(body["input_ids"], body["sampling_params"]))

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, rid: str, body: Json, reply: Reply
    ) -> None:
        if reply.error is not None:
            await _send(response, {"error": self._error(reply.error)})
            await response.write(b"data: [DONE]\n\n")
            return
        state = RunningReply(reply, body, cumulative=self.cumulative, routing=self.routing)
        for n_tokens in state.steps():
            await asyncio.sleep(reply.delay_s + self.token_delay_s * n_tokens)
            await self._until_free(rid, holding=state.n_sent == reply.hold_after)
            if state.n_sent == reply.drop_after:
                assert request.transport is not None
                request.transport.abort()
                return
            aborted, state.retractions = rid in self._aborted, self.retractions[rid]
            await _send(response, self._event(state, 0 if aborted else n_tokens, aborted=aborted))
            if aborted:
                break
        for event in self._closing(state):
            await _send(response, event)
        await response.write(b"data: [DONE]\n\n")

    def _event(self, state: RunningReply, n_tokens: int, *, aborted: bool) -> Json:
        """The next event of a reply."""
        event = state.event(n_tokens, self.version, aborted=aborted)
        if aborted and self.paused and self.pause_mode == "retract":
            state.repeat_last(event)
        return event

    def _closing(self, state: RunningReply) -> list[Json]:
        """The events between the last one of a reply and the end of the stream."""
        return []

    def _error(self, message: str, code: int = 400) -> Json:
        """The value of `error` in an answer or event."""
        return {"message": message, "code": code}

    def _holds(self, rid: str) -> bool:
        """Whether a pause stops a request."""
        return self.paused

    async def _until_free(self, rid: str, *, holding: bool) -> None:
        """Wait while the engine is paused, and for `release` if the reply holds here; an abort ends both waits."""
        async with self._changed:
            if holding:
                self.holding += 1
                try:
                    await self._changed.wait_for(lambda: self._released > 0 or rid in self._aborted)
                finally:
                    self.holding -= 1
                self._released -= rid not in self._aborted
            await self._changed.wait_for(lambda: not self._holds(rid) or rid in self._aborted)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _compiles(params: Json) -> bool:
    """Whether the syntax of a grammar is valid. Scripted replies need not follow it."""
    try:
        re.compile(params.get("regex") or "")
        schema = orjson.loads(params.get("json_schema") or "{}")
    except (re.error, orjson.JSONDecodeError):
        return False
    types = {"object", "array", "string", "number", "integer", "boolean", "null", None}
    return isinstance(schema, dict) and (not isinstance(schema.get("type"), str) or schema["type"] in types)


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


def as_json(value: Any, status: int = 200) -> web.Response:
    """An answer with a JSON body."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
