"""A scriptable inference engine for tests: SGLang's HTTP surface on a real socket, without a model.

    with FakeEngine() as engine:
        engine.enqueue(Reply([5, 6, 2], chunks=[1, 2]))
        ...                                   # point an EngineClient, a proxy, … at engine.url
        assert engine.requests[0]["input_ids"] == [...]

Queued replies are given in order; with none left, `respond(input_ids, sampling_params)` decides, which by default is a
fixed function of the prompt. Pauses, aborts and weight updates act on running replies as they do in SGLang, so version
spans come out right; adapters are loaded, named, waited for and unloaded as there. Nothing is timed:
`Reply.hold_after` and `release` let a test act at an exact token.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import orjson
from aiohttp import web

from agentrl.domain.schemas import Json

END_OF_TURN = 2
Respond = Callable[[list[int], Json], Sequence[int]]
Omission = Literal["output_ids", "output_token_logprobs", "weight_versions", "finish_reason"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted response of `/generate`."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None  # as long as ids; by default -1/8, -2/8, …
    chunks: Sequence[int] | None = None  # how many tokens each event brings; by default by `stream_interval`, or one
    finish_reason: str | None = None  # by default `length` if max_new_tokens cut the ids, else `stop`
    matched_stop: int | str | None = None  # by default the last id
    versions: Sequence[int] | None = None  # of each token; by default the version served when it is sent
    hold_after: int | None = None  # after this many tokens wait for `FakeEngine.release`
    drop_after: int | None = None  # after this many tokens cut the connection
    delay_s: float = 0.0  # before each event
    status: int | None = None  # answer with this HTTP status instead
    error: str | None = None  # the message beside `status`, or of an error event in the stream
    omit: frozenset[Omission] = field(default_factory=frozenset)  # leave these out, as a broken engine would


def fixed_answer(input_ids: list[int], sampling_params: Json) -> list[int]:
    """Three tokens that depend on the prompt alone, then the end of the turn."""
    base = sum((i + 1) * token for i, token in enumerate(input_ids))
    return [3 + (base + 7 * i) % 200 for i in range(3)] + [END_OF_TURN]


class FakeEngine:
    """Serves from `with` or `start()` until `stop()`, in a thread of its own, on 127.0.0.1.

    `requests` holds the bodies of `/generate`, `calls` every other POST as (path, body), `disconnected` the rids whose
    client went away, all in the order of their arrival; `running` the rids under way, `holding` counts the replies
    that wait at their `hold_after`.
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
        port: int = 0,
    ) -> None:
        self.respond = respond
        self.base_version = version
        self.version: int | str = version
        self.model_path = model_path
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.cumulative = cumulative
        self.takes_adapters = takes_adapters
        self.key = key
        self.token_delay_s = token_delay_s
        self.port = port
        self.paused = False
        self.pause_mode = "abort"
        self.fail_next_update: str | None = None  # of weights, or the loading of an adapter
        self.update_takes_s = 0.0  # from a folder
        self.groups: set[str] = set()  # that it has joined; nothing is received over them
        self.updating = False  # between begin and end of an update by tensors
        self._loaded = "the weights of its start"
        self.digests: dict[str, str] | None = None  # of its weights; None: of where they are from
        self.adapters: dict[str, str] = {}  # name → folder
        self.requests: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.calls: list[tuple[str, Json]] = []
        self.disconnected: list[str] = []
        self.running: set[str] = set()
        self.holding = 0
        self._aborted: set[str] = set()
        self._replies: deque[Reply] = deque()
        self._released = 0
        self._changed = asyncio.Condition()
        self._once_loaded: dict[str, str] = {}
        self._in_use: dict[str, str] = {}  # rid → adapter
        self._adapters_change = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- what a test says ------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address of the server; stays the same over `stop` and `start`."""
        assert self.port, "the fake engine has not been started"
        return f"http://127.0.0.1:{self.port}"

    def enqueue(self, *replies: Reply | Sequence[int]) -> None:
        """Give these replies to the next requests; a plain list of ids is a Reply."""
        self._replies.extend(reply if isinstance(reply, Reply) else Reply(reply) for reply in replies)

    def release(self) -> None:
        """Let one reply that waits at its `hold_after` go on (or the next one that gets there)."""
        self._released += 1
        self._wake()

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
        """Serve base weights, unpaused: what a restarted engine does."""
        self.version, self.paused = self.base_version, False
        self.adapters, self._once_loaded, self._in_use = {}, {}, {}
        self.groups, self.updating = set(), False
        self._changed, self._adapters_change = asyncio.Condition(), asyncio.Lock()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="fake-engine", daemon=True)
        self._thread.start()
        assert started.wait(10), "the fake engine did not start"
        return self

    def stop(self) -> None:
        """Die at once, running replies included."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._thread = self._loop = None

    # -- the server ------------------------------------------------------------------------------------------------

    def _serve(self, started: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        started.set()
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(runner.cleanup())
        loop.close()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[self._key_required])
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._server_info)
        controls: dict[str, Callable[[Json], Awaitable[tuple[int, Json]]]] = {
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_weights_from_disk,
            "/update_weight_version": self._update_weight_version,
            "/init_weights_update_group": self._init_weights_update_group,
            "/destroy_weights_update_group": self._destroy_weights_update_group,
            "/begin_weight_update": self._begin_weight_update,
            "/end_weight_update": self._end_weight_update,
            "/update_weights_from_distributed": self._update_weights_from_distributed,
            "/update_weights_from_tensor": self._update_weights_from_tensor,
            "/load_lora_adapter": self._load_lora_adapter,
            "/unload_lora_adapter": self._unload_lora_adapter,
            "/flush_cache": self._flush_cache,
            "/weights_checker": self._weights_checker,
        }
        for path, control in controls.items():
            app.router.add_post(path, self._recorded(path, control))
        return app

    @web.middleware
    async def _key_required(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.key is None or request.path in ("/health", "/ready") or given == f"Bearer {self.key}":
            return await handler(request)
        return _json({"error": {"message": "this engine needs its key", "code": 401}}, 401)

    def _recorded(
        self, path: str, control: Callable[[Json], Awaitable[tuple[int, Json]]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            body = orjson.loads(await request.read() or b"{}")
            self.calls.append((path, body))
            status, answer = await control(body)
            async with self._changed:
                self._changed.notify_all()
            return _json(answer, status)

        return handler

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json({"model_path": self.model_path, "weight_version": str(self.version)})

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": self.model_path, "root": self.model_path, "parent": None}
        loaded = [{"id": name, "root": path, "parent": self.model_path} for name, path in self.adapters.items()]
        return _json({"object": "list", "data": [base, *loaded]})

    async def _abort_request(self, body: Json) -> tuple[int, Json]:
        rid = body.get("rid", "")
        self._aborted |= {r for r in self.running if body.get("abort_all") or r.startswith(rid)}
        return 200, {}

    async def _pause_generation(self, body: Json) -> tuple[int, Json]:
        self.paused, self.pause_mode = True, body.get("mode", "abort")
        if self.pause_mode == "abort":
            self._aborted |= self.running
        return 200, {"status": "ok"}

    async def _continue_generation(self, body: Json) -> tuple[int, Json]:
        self.paused = False
        return 200, {"status": "ok"}

    async def _update_weights_from_disk(self, body: Json) -> tuple[int, Json]:
        await asyncio.sleep(self.update_takes_s)
        problem, self.fail_next_update = self.fail_next_update, None
        problem = problem or _missing(body["model_path"])
        if problem is not None:
            return 400, {"success": False, "message": problem}
        self.model_path = body["model_path"]
        self.version = body.get("weight_version") or self.version
        self._loaded = f"{self.model_path}@{self.version}"
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    async def _update_weight_version(self, body: Json) -> tuple[int, Json]:
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json({"tp_size": 1})

    async def _init_weights_update_group(self, body: Json) -> tuple[int, Json]:
        self.groups.add(body["group_name"])
        return _done(None)

    async def _destroy_weights_update_group(self, body: Json) -> tuple[int, Json]:
        known = body["group_name"] in self.groups
        self.groups.discard(body["group_name"])
        return _done(None if known else "The group to be destroyed does not exist.")

    async def _begin_weight_update(self, body: Json) -> tuple[int, Json]:
        was, self.updating = self.updating, True
        return _done("a weight-update session is already open" if was else None)

    async def _end_weight_update(self, body: Json) -> tuple[int, Json]:
        was, self.updating = self.updating, False
        return _done(None if was else "no weight-update session is open")

    async def _update_weights_from_distributed(self, body: Json) -> tuple[int, Json]:
        if self.updating and body["group_name"] not in self.groups:
            return _done(f"Failed to receive weights: Group {body['group_name']} not in {sorted(self.groups)}.")
        return await self._update_weights_from_tensor(body)

    async def _update_weights_from_tensor(self, body: Json) -> tuple[int, Json]:
        problem, self.fail_next_update = self.fail_next_update, None
        if not self.updating:
            problem = "must run between begin_weight_update() and end_weight_update()"
        if problem is None:
            self.version = body.get("weight_version") or self.version
            self._loaded = f"{self.model_path}@{self.version}"
        return _done(problem)

    async def _load_lora_adapter(self, body: Json) -> tuple[int, Json]:
        async with self._adapters_change:
            problem = self._load(body["lora_name"], body["lora_path"])
        return (200 if problem is None else 400), {"success": problem is None, "error_message": problem or ""}

    def _load(self, name: str, path: str) -> str | None:
        """Why an adapter is not loaded."""
        problem, self.fail_next_update = self.fail_next_update, None
        if not self.takes_adapters:
            problem = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        elif name in self.adapters:
            problem = f"Failed to load LoRA adapter {name} because it is already loaded"
        problem = problem or _missing(path)
        if problem is None:
            self.adapters[name] = self._once_loaded[name] = path
        return problem

    async def _unload_lora_adapter(self, body: Json) -> tuple[int, Json]:
        name = body["lora_name"]
        async with self._adapters_change:
            if self.adapters.pop(name, None) is None:
                return 400, {"success": False, "error_message": f"LoRA with name {name} does not exist."}
            async with self._changed:
                await self._changed.wait_for(lambda: name not in self._in_use.values())
        return 200, {"success": True, "error_message": ""}

    async def _name_adapter(self, rid: str, name: str) -> str | None:
        """Let a request use an adapter, which is loaded again if it was unloaded; why it cannot."""
        if name not in self._once_loaded:
            return f"Got LoRA adapter that has never been loaded: {name}"
        if name not in self.adapters:
            async with self._adapters_change:
                problem = self._load(name, self._once_loaded[name])
            if problem is not None:
                return f"Failed to implicitly load LoRA adapter {name}: {problem}"
        self._in_use[rid] = name
        return None

    async def _flush_cache(self, body: Json) -> tuple[int, Json]:
        return (400, {"message": "requests are running"}) if self.running and not self.paused else (200, {})

    async def _weights_checker(self, body: Json) -> tuple[int, Json]:
        digests = self.digests or {"weights": self._loaded}
        return 200, {"success": True, "ranks": [{"checksums": digests}]}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self._dies_of(body):
            self.stop()
            await asyncio.sleep(3600)
        reply = self._replies.popleft() if self._replies else self._default_reply(body)
        if reply.status is not None:
            return _json({"error": {"message": reply.error or "scripted failure"}}, reply.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        rid, adapter = body["rid"], body.get("lora_path")
        if adapter is not None and (problem := await self._name_adapter(rid, adapter)) is not None:
            reply = Reply(error=problem)
        self.running.add(rid)
        try:
            await self._stream(request, response, rid, body, reply)
        except asyncio.CancelledError:
            self.disconnected.append(rid)
            raise
        finally:
            self.running.discard(rid)
            self._aborted.discard(rid)
            async with self._changed:
                self._in_use.pop(rid, None)
                self._changed.notify_all()
        return response

    def _dies_of(self, body: Json) -> bool:
        """Whether a request ends the server, as unknown ids and a top_k of more than 31 bits end SGLang."""
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
            await _send(response, {"error": {"message": reply.error, "code": 400}})
            return
        state = _Running(reply, body, cumulative=self.cumulative)
        for n_tokens in state.steps():
            await asyncio.sleep(reply.delay_s + self.token_delay_s * n_tokens)
            await self._until_free(rid, holding=state.n_sent == reply.hold_after)
            if state.n_sent == reply.drop_after:
                assert request.transport is not None
                request.transport.abort()
                return
            aborted = rid in self._aborted
            event = state.event(0 if aborted else n_tokens, self.version, aborted=aborted)
            if aborted and self.paused and self.pause_mode == "retract":
                state.repeat_last(event)
            await _send(response, event)
            if aborted:
                break
        await response.write(b"data: [DONE]\n\n")

    async def _until_free(self, rid: str, *, holding: bool) -> None:
        """Wait while paused, and for `release` where the reply holds; an abort ends both waits."""
        async with self._changed:
            if holding:
                self.holding += 1
                try:
                    await self._changed.wait_for(lambda: self._released > 0 or rid in self._aborted)
                finally:
                    self.holding -= 1
                self._released -= rid not in self._aborted
            await self._changed.wait_for(lambda: not self.paused or rid in self._aborted)

    def _wake(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        assert self._loop is not None, "the fake engine is not running"
        asyncio.run_coroutine_threadsafe(notify(), self._loop).result(10)


class _Running:
    """One reply under way: what has been sent, and by which version each token was sampled."""

    def __init__(self, reply: Reply, body: Json, *, cumulative: bool) -> None:
        limit = body["sampling_params"].get("max_new_tokens", 128)
        self.reply = reply
        self.body = body
        self.cumulative = cumulative
        self.ids = list(reply.ids)[:limit]
        self.cut = len(reply.ids) > limit or reply.finish_reason == "length"
        self.logprobs = list(reply.logprobs or [-(i + 1) / 8 for i in range(len(self.ids))])
        self.token_versions: list[int | str] = []

    @property
    def n_sent(self) -> int:
        return len(self.token_versions)

    def steps(self) -> Sequence[int]:
        """Tokens of each event; events begin exactly at `hold_after` and `drop_after`."""
        if self.reply.chunks is not None:
            borders = set(accumulate(self.reply.chunks))
        else:
            interval = self.body["sampling_params"].get("stream_interval") or 1
            borders = set(range(1, len(self.ids), interval))  # the first token at once
        borders.add(len(self.ids))
        borders |= {n for n in (self.reply.hold_after, self.reply.drop_after) if n is not None}
        ends = sorted(b for b in borders if 0 < b <= len(self.ids))
        steps = [end - start for start, end in pairwise([0, *ends])]
        at_end = len(self.ids) in (self.reply.hold_after, self.reply.drop_after)
        return [*steps, 0] if at_end or not steps else steps

    def event(self, n_tokens: int, version: int | str, *, aborted: bool) -> Json:
        start = 0 if self.cumulative else self.n_sent
        self.token_versions += [version] * n_tokens
        n, omit = self.n_sent, self.reply.omit
        holds_back = len(self.ids) in (self.reply.hold_after, self.reply.drop_after) and n_tokens > 0
        done = aborted or (n == len(self.ids) and not holds_back)
        labels = [str(v) for v in (self.reply.versions or self.token_versions)[:n]]
        meta: Json = {
            "id": self.body["rid"],
            "prompt_tokens": len(self.body["input_ids"]),
            "completion_tokens": n,
            "cached_tokens": 0,
            "weight_version": str(version),
            "finish_reason": self._finish_reason(aborted) if done and "finish_reason" not in omit else None,
            "output_token_logprobs": [[self.logprobs[i], self.ids[i], None] for i in range(start, n)],
        }
        if top := self.body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [self._likeliest(i, top) for i in range(start, n)]
        if done:
            meta["weight_versions"] = spans_of(labels) or [{"version": str(version), "start": 0, "end": 0}]
        event: Json = {"text": "", "output_ids": self.ids[start:n], "meta_info": meta}
        for name in omit - {"finish_reason"}:
            event.pop(name, None)
            meta.pop(name, None)
        return event

    def repeat_last(self, event: Json) -> None:
        """What SGLang does in the last event of a request that is aborted while it is retracted."""
        if not self.cumulative and self.n_sent:
            event["output_ids"] = [self.ids[self.n_sent - 1]]
            whole = [[self.logprobs[i], self.ids[i], None] for i in range(self.n_sent)]
            event["meta_info"]["output_token_logprobs"] = whole

    def _likeliest(self, at: int, count: int) -> list[Any]:
        """The sampled token and the ids that follow it, each one nat less likely."""
        return [[self.logprobs[at] - k, self.ids[at] + k, None] for k in range(count)]

    def _finish_reason(self, aborted: bool) -> Json:
        kind = "abort" if aborted else self.reply.finish_reason or ("length" if self.cut else "stop")
        if kind != "stop":
            return {"type": kind}
        matched = self.reply.matched_stop
        return {"type": "stop", "matched": self.ids[-1] if matched is None and self.ids else matched}


def _compiles(params: Json) -> bool:
    """Whether a grammar could be one; what it demands is the scripted replies' business."""
    try:
        re.compile(params.get("regex") or "")
        schema = orjson.loads(params.get("json_schema") or "{}")
    except (re.error, orjson.JSONDecodeError):
        return False
    types = {"object", "array", "string", "number", "integer", "boolean", "null", None}
    return isinstance(schema, dict) and (not isinstance(schema.get("type"), str) or schema["type"] in types)


def spans_of(labels: Sequence[str]) -> list[Json]:
    """["0", "0", "1"] → [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]."""
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    return [{"version": labels[s], "start": s, "end": e} for s, e in pairwise([*starts, len(labels)])]


def _done(problem: str | None) -> tuple[int, Json]:
    return (200 if problem is None else 400), {"success": problem is None, "message": problem or "Success"}


def _missing(folder: str) -> str | None:
    return None if Path(folder).is_dir() else f"no such folder: {folder}"


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
