"""ASGI middleware of an engine's HTTP process: refuses a folder that the server would load wrongly.

POST /load_lora_adapter {"lora_path": "/shared/runs/math/weights/v12-ID", …}
    ├─ fits the model ──► the server
    └─ does not fit  ──► 400 with the reason; the server is not asked
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.engine.prepared.asgi_bodies import MOST_BYTES, answer_json, read_body, replay
from agentrl.errors import ModelFolderError


@dataclass(frozen=True, slots=True)
class Loads:
    """A route by which a server is told to load a folder."""

    field: str  # of the body, that names the folder
    check: Callable[[Path], None]  # raises ModelFolderError


class ChecksFolders:
    """Checks the folders of these routes (path → `Loads`) before the server reads them. Other bodies pass."""

    def __init__(self, app: Any, *, routes: Mapping[str, Loads]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 400 for a folder that does not fit, else call the app."""
        loads = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if loads is None:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            await _refuse(send, f"the body is larger than {MOST_BYTES} bytes")
            return
        folder = _folder(body, loads.field)
        if folder is not None:
            try:
                await asyncio.to_thread(loads.check, folder)
            except ModelFolderError as error:
                await _refuse(send, str(error))
                return
        await self._app(scope, replay(body, receive), send)


def _folder(body: bytes, field: str) -> Path | None:
    """The folder that a body names; None for a body that the server will refuse itself."""
    try:
        value = json.loads(body)[field]
    except (ValueError, KeyError, TypeError):
        return None
    return Path(value) if isinstance(value, str) else None


async def _refuse(send: Any, message: str) -> None:
    await answer_json(send, 400, {"success": False, "message": message})
