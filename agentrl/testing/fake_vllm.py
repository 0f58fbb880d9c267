"""A scriptable inference engine for tests: vLLM's HTTP API, scripted as `FakeEngine`, without a model.

    with FakeVLLM() as engine:
        engine.enqueue(Reply([5, 6, 2]))
        ...
        assert engine.requests[0]["token_ids"] == [...]

By default it answers as a server that agentrl started: exact version spans in every event, weights that are loaded from
a folder, digests, a key for all routes. With `stock` it answers as `vllm serve` does: its label is `default` until it
gets another one.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from agentrl.domain.schemas import Json
from agentrl.engine.engine_client import Capability
from agentrl.testing.fake_controls import Control, missing_folder
from agentrl.testing.fake_engine import FakeEngine, as_json
from agentrl.testing.replies import Reply, RunningReply
from agentrl.testing.vllm_replies import PREFIX, event_of, in_sglangs_words, problem_of, usage_of

RELEASE = "0.32.0"
"""The release of vLLM that it imitates."""
FRESH = "default"
"""The label of weights before a label is set."""
CORE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
MODES = ("abort", "wait", "keep")
PROMISES = frozenset(Capability) - {
    Capability.PREPARATION,
    Capability.TENSORS,
    Capability.HANDLES,
    Capability.ADAPTERS,
    Capability.MEMORY,
    Capability.EXPERTS,
}
"""The abilities of a server that agentrl started, except adapters."""


class FakeVLLM(FakeEngine):
    """Serves as `FakeEngine` does. `dev_mode`, `scale_out` and `logprobs_mode` say how a stock server was started: with
    `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`, `--logprobs-mode`.
    """

    def __init__(
        self,
        *arguments: Any,
        stock: bool = False,
        dev_mode: bool = True,
        scale_out: bool = True,
        logprobs_mode: str = "processed_logprobs",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.stock = stock
        self.dev_mode = dev_mode or not stock
        self.scale_out = scale_out or not stock
        self.logprobs_mode = logprobs_mode
        self.core_died = False
        self.server_release = RELEASE
        self._base_path = self.model_path
        self._draining: set[str] = set()  # requests that a pause lets finish

    def kill_core(self) -> None:
        """Let the process that computes die: running replies end with an error."""
        self.core_died = True
        self._aborted |= self.running
        self._server.call(self._notify())

    def _reset(self) -> None:
        super()._reset()
        self.core_died, self._draining = False, set()
        if self.stock:
            self.version = FRESH

    # -- routes ----------------------------------------------------------------------------------------------------

    def _add_routes(self, app: web.Application) -> None:
        add, router = self._add_control, app.router
        router.add_post("/inference/v1/generate", self._generate)
        add(router, "/inference/v1/abort_requests", self._abort_requests)
        router.add_get("/health", self._health)
        router.add_get("/v1/models", self._models)
        router.add_get("/version", self._get_version)
        router.add_get("/openapi.json", self._openapi)
        if self.takes_adapters:
            add(router, "/v1/load_lora_adapter", self._load_lora_adapter)
            add(router, "/v1/unload_lora_adapter", self._unload_lora_adapter)
        if self.dev_mode:
            add(router, "/abort_requests", self._abort_any)
            router.add_post("/pause", self._pause)
            add(router, "/resume", self._continue_generation)
            router.add_get("/server_info", self._server_info)
            router.add_get("/is_paused", self._is_paused)
            router.add_get("/weight_info", self._weight_info)
            router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
            add(router, "/update_weight_version", self._update_weight_version)
            add(router, "/weight_checker", self._weight_checker)
        if not self.stock:
            router.add_get("/ready", self._ready)
            router.add_get("/agentrl/server", self._promises)
            router.add_get("/agentrl/digests", self._digests)
            add(router, "/update_weights_from_disk", self._load_folder)

    def _add_control(self, router: web.UrlDispatcher, path: str, control: Control) -> None:
        router.add_post(path, self._recorded(path, control))

    def _is_open(self, path: str) -> bool:
        return not path.startswith(("/v1", "/inference")) if self.stock else path in ("/health", "/ready")

    async def _ready(self, request: web.Request) -> web.Response:
        return self._of_core({"is_paused": self.paused}, 503)

    async def _is_paused(self, request: web.Request) -> web.Response:
        return self._of_core({"is_paused": self.paused})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.core_died else 200)

    async def _weight_info(self, request: web.Request) -> web.Response:
        return self._of_core({"weight_version": str(self.version)})

    async def _get_version(self, request: web.Request) -> web.Response:
        return as_json({"version": self.server_release})

    async def _openapi(self, request: web.Request) -> web.Response:
        return as_json({"paths": {resource.canonical: {} for resource in request.app.router.resources()}})

    async def _promises(self, request: web.Request) -> web.Response:
        promises = PROMISES | ({Capability.ADAPTERS} if self.takes_adapters else set())
        return as_json({"capabilities": sorted(promises), "vllm": self.server_release})

    async def _server_info(self, request: web.Request) -> web.Response:
        return as_json({"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}})

    async def _digests(self, request: web.Request) -> web.Response:
        return as_json({"ranks": [self._weights_digests()]})

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": self._base_path, "root": self._base_path, "parent": None, "max_model_len": self.context_length}
        loaded = [{"id": name, "root": path, "parent": self._base_path} for name, path in self.adapters.items()]
        return as_json({"object": "list", "data": [base, *loaded]})

    def _of_core(self, answer: Json, dead: int = 500) -> web.Response:
        """An answer of the process that computes, or the status `dead`."""
        return as_json({"error": self._error(CORE_DIED, dead)}, dead) if self.core_died else as_json(answer)

    # -- controls --------------------------------------------------------------------------------------------------

    async def _abort_requests(self, body: Json) -> tuple[int, Json | None]:
        names = body.get("request_ids")
        if names is None:
            return 400, {"detail": "Missing 'request_ids' in request body"}
        self._aborted |= {rid for rid in self.running if f"{PREFIX}{rid}" in names}
        return 200, None

    async def _abort_any(self, body: Json) -> tuple[int, Json | None]:
        """The route of the dev mode: without ids it ends all requests."""
        if body.get("request_ids"):
            return await self._abort_requests(body)
        self._aborted |= self.running
        return 200, {"status": "aborted", "aborted": len(self.running)}

    async def _pause(self, request: web.Request) -> web.Response:
        """Hold requests: `keep` all of them, `wait` those that arrive from now on, `abort` those too after it has ended
        the others.
        """
        mode = request.query.get("mode", "abort")
        self.calls.append((request.path_qs, {}))
        if mode not in MODES:
            return as_json({"error": self._error(f"mode: Input should be one of {MODES}")}, 400)
        self.paused, self.pause_mode = True, mode
        self._draining = set(self.running) if mode == "wait" else set()
        if mode == "abort":
            self._aborted |= self.running
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._draining & self.running)
        return as_json({"status": "paused"})

    def _holds(self, rid: str) -> bool:
        return self.paused and rid not in self._draining

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Clear the cache. `reset_running_requests` also takes running ones out of it, which are computed again."""
        self.calls.append((request.path_qs, {}))
        if request.query.get("reset_running_requests") == "true":
            self.retractions.update(self.running)
            if self.paused:
                self.pause_mode = "retract"
            return as_json({"success": True})
        return as_json({"success": self._is_idle()})

    async def _weight_checker(self, body: Json) -> tuple[int, Json]:
        if body.get("action") != "checksum":
            return 400, {"error": self._error("action: Input should be 'checksum'")}
        return 200, {"checksums": self._weights_digests()}

    async def _load_folder(self, body: Json) -> tuple[int, Json]:
        """Load a folder; a server that is not paused pauses meanwhile."""
        if missing_folder(body["model_path"]) is None and body.get("flush_cache") and not self._is_idle():
            return 400, {"success": False, "message": "the prefix cache cannot be cleared: requests use it"}
        return await self._update_weights_from_disk(body)

    async def _load_lora_adapter(self, body: Json) -> tuple[int, Json | None]:
        name, folder = body["lora_name"], body["lora_path"]
        problem, self.fail_next_update = self.fail_next_update, None
        if name in self.adapters:
            return 400, {"error": self._error(f"The lora adapter '{name}' has already been loaded.")}
        if problem is not None:
            return 500, {"error": self._error(problem, 500)}
        if missing_folder(folder) is not None:
            return 404, {"error": self._error(f"Loading lora {name} failed: No adapter found for {folder}", 404)}
        self.adapters[name] = folder
        return 200, None

    async def _unload_lora_adapter(self, body: Json) -> tuple[int, Json | None]:
        """Forget an adapter; requests that use it go on."""
        name = body["lora_name"]
        if self.adapters.pop(name, None) is None:
            return 404, {"error": self._error(f"The lora adapter '{name}' cannot be found.", 404)}
        return 200, None

    # -- generate --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        self.requests.append(asked)
        self.headers.append(dict(request.headers))
        if not self.scale_out:
            return as_json({"error": self._error("Scale-out endpoints are disabled", 403)}, 403)
        if self.core_died:
            return self._of_core({})
        if (problem := problem_of(asked, self.vocab_size)) is not None:
            return as_json({"error": self._error(problem)}, 400)
        model = asked.get("model")
        if model and model != self._base_path and model not in self.adapters:
            return as_json({"error": self._error(f"The model `{model}` does not exist.", 404)}, 404)
        body = in_sglangs_words(asked)
        reply = self._replies.popleft() if self._replies else self._default_reply(body)
        if reply.status is not None:
            return as_json({"error": self._error(reply.error or "scripted failure", reply.status)}, reply.status)
        return await self._answer(request, body, reply)

    def _default_reply(self, body: Json) -> Reply:
        length = len(body["input_ids"])
        if length >= self.context_length:
            longest = f"longer than the maximum model length of {self.context_length}"
            return Reply(error=f"The decoder prompt (length {length}) is {longest}.")
        return super()._default_reply(body)

    def _event(self, state: RunningReply, n_tokens: int, *, aborted: bool) -> Json:
        if self.core_died:
            return {"error": self._error(CORE_DIED, 500)}
        told = state.event(n_tokens, self.version, aborted=aborted)
        return event_of(state, told, early_spans=not self.stock)

    def _closing(self, state: RunningReply) -> list[Json]:
        return [] if self.core_died else [usage_of(state)]

    def _error(self, message: str, code: int = 400) -> Json:
        kinds = {400: "BadRequestError", 404: "NotFoundError"}
        return {"message": message, "type": kinds.get(code, "InternalServerError"), "param": None, "code": code}
