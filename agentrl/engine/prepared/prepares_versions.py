"""ASGI middleware of SGLang's HTTP process: the `/agentrl/` routes, in front of SGLang's own."""

from __future__ import annotations

from typing import Any

from agentrl.engine.control.preparation import VERSIONS
from agentrl.engine.prepared.asgi_bodies import MOST_BYTES, answer_json, read_body
from agentrl.engine.prepared.prepared_routes import PATHS, REPLACING, answer
from agentrl.engine.prepared.preparer import Preparer
from agentrl.engine.prepared.scheduler_stager import SchedulerStager, ask_app
from agentrl.engine.prepared.version_host import VersionHost
from agentrl.errors import CannotPrepare, EngineError


class PreparesVersions:
    """Prepares versions in the schedulers behind `app`, and serves this host's versions to other hosts."""

    def __init__(self, app: Any, *, host: VersionHost) -> None:
        self._app = app
        self._host = host
        self._stager = SchedulerStager(ask_app(app))
        self._preparer = Preparer(host.fetch, self._stager)
        self._can_stage = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer our routes; pass others on. At the server's end its fetch ends at the next piece."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return self._preparer.forget()
        path = scope["path"] if scope["type"] == "http" else ""
        if path.startswith(VERSIONS):
            await self._host.files(scope, receive, send)
        elif path in PATHS:
            await self._answer(scope["method"], path, await read_body(receive), send)
        else:
            if path in REPLACING and scope["method"] == "POST":
                self._preparer.forget()
            await self._app(scope, receive, send)

    async def _answer(self, method: str, path: str, body: bytes | None, send: Any) -> None:
        if body is None:
            return await answer_json(send, 400, _failure(f"the body is larger than {MOST_BYTES} bytes"))
        try:
            if not self._can_stage:
                await self._stager.can_stage()
                self._can_stage = True
            found = await answer(self._preparer, method, path, body)
        except CannotPrepare as error:
            return await answer_json(send, 404, _failure(str(error)))
        except EngineError as error:
            return await answer_json(send, 500, _failure(str(error)))
        await answer_json(send, found.status, found.body)


def _failure(message: str) -> dict[str, Any]:
    return {"success": False, "message": message}
