"""ASGI middleware of an engine's HTTP process: refuses a folder that the server would load wrongly.

POST /load_lora_adapter {"lora_path": "/shared/runs/math/weights/v12-ID", …}
    ├─ fits the model ──► the server
    └─ does not fit  ──► 400 with the reason; the server is not asked
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.prepared.asgi_bodies import MOST_BYTES, answer_json, read_body, replay
from agentrl.errors import ModelFolderError

CHECKS: dict[str, tuple[str, Callable[[LoadChecks, Path], None]]] = {
    "/update_weights_from_disk": ("model_path", LoadChecks.checkpoint),
    "/load_lora_adapter": ("lora_path", LoadChecks.adapter),  # of SGLang
    "/v1/load_lora_adapter": ("lora_path", LoadChecks.adapter),  # of vLLM
}
"""The routes by which servers are told to load a folder, the field of the body that names it, and its check."""


class ChecksFolders:
    """Checks folders before the server reads them. Bodies that name none pass."""

    def __init__(self, app: Any, *, checks: LoadChecks) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 400 for a folder that does not fit, else call the app."""
        found = CHECKS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        field, check = found
        body = await read_body(receive)
        if body is None:
            await _refuse(send, f"the body is larger than {MOST_BYTES} bytes")
            return
        folder = _folder(body, field)
        if folder is not None:
            try:
                await asyncio.to_thread(check, self._checks, folder)
            except ModelFolderError as error:
                await _refuse(send, str(error))
                return
        await self._app(scope, replay(body, receive), send)


def _folder(body: bytes, field: str) -> Path | None:
    """The folder that a body names; None for a body that the server will refuse itself."""
    try:
        value = json.loads(body)[field]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Path(value) if isinstance(value, str) else None


async def _refuse(send: Any, message: str) -> None:
    await answer_json(send, 400, {"success": False, "message": message})
