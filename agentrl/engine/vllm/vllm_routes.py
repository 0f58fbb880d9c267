"""The routes that agentrl adds to vLLM's server, in its HTTP process.

GET  /ready                      {"is_paused": …}, from this process alone; 503 when the core has died
GET  /agentrl/server             what the server can do
POST /update_weights_from_disk   load a folder, label it; a bad one changes nothing
GET  /agentrl/digests            digests of the weights in memory, for each rank
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.engine.control.preparation import UNDEFINED
from agentrl.engine.vllm.vllm_paths import DIGESTS, LOAD, PROMISES, READY


class ServerRoutes:
    """Answers our routes. `promises` is the answer at PROMISES."""

    def __init__(self, promises: dict[str, Any]) -> None:
        self._promises = promises
        self._loading = asyncio.Lock()

    def add_to(self, app: Any) -> None:
        """Add the routes to a Starlette app."""
        app.add_route(READY, self.ready, methods=["GET"])
        app.add_route(PROMISES, self.promises, methods=["GET"])
        app.add_route(LOAD, self.load, methods=["POST"])
        app.add_route(DIGESTS, self.digests, methods=["GET"])

    async def ready(self, request: Any) -> Any:
        """Whether the server is paused, without a question to its core."""
        engine = request.app.state.engine_client
        if engine.errored:
            return _json({"error": "the engine's core has died"}, 503)
        return _json({"is_paused": engine.agentrl_paused})

    async def promises(self, request: Any) -> Any:
        """The abilities of the server."""
        return _json(self._promises)

    async def digests(self, request: Any) -> Any:
        """Digests of the weights in memory."""
        ranks = await request.app.state.engine_client.collective_rpc("agentrl_digests")
        return _json({"ranks": ranks})

    async def load(self, request: Any) -> Any:
        """Load a folder under a pause, and set the label; without one, the label stays. The server goes on unless it
        was paused before, or the load failed in the middle: its label is then UNDEFINED.
        """
        body = await request.json()
        async with self._loading:
            engine = request.app.state.engine_client
            was_paused = engine.agentrl_paused
            if not was_paused:
                await engine.pause_generation(mode="keep", clear_cache=False)
            problem = await _load(engine, body["model_path"], body["weight_version"], flush=body["flush_cache"])
            if not was_paused and await engine.get_weight_version() != UNDEFINED:
                await engine.resume_generation()
        if problem is not None:
            return _json({"success": False, "message": problem}, 400)
        return _json({"success": True})


async def _load(engine: Any, folder: str, label: str | None, *, flush: bool) -> str | None:
    """Load a folder into a paused engine. Returns why it failed; None if it did not."""
    problems = await engine.collective_rpc("agentrl_problem", args=(folder,))
    if problem := next(filter(None, problems), None):
        return str(problem)
    if flush and not await engine.reset_prefix_cache():
        return "the prefix cache cannot be cleared: requests use it"
    before = await engine.get_weight_version()
    await engine.update_weight_version(UNDEFINED)
    failures = await engine.collective_rpc("agentrl_load", args=(folder,))
    if failure := next(filter(None, failures), None):
        return str(failure)
    await engine.update_weight_version(before if label is None else label)
    return None


def _json(value: dict[str, Any], status: int = 200) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(value, status_code=status)
