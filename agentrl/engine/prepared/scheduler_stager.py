"""Stages versions in SGLang's schedulers, from its HTTP process, by requests to the app behind our middleware.

stage:  /weights_checker "agentrl:stage …" ──► "agentrl:staged" until ready or failed
swap:   /weights_checker "agentrl:swap …"  ──► /update_weight_version, for the label in the HTTP process
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.engine.control.preparation import UNDEFINED, Order, PreparationState, Swap
from agentrl.engine.prepared.preparer import Digests, Stager
from agentrl.errors import CannotPrepare, EngineError, NotPrepared

POLL_S = 0.1
PREFIX = "agentrl:"
Ask = Callable[[str, Json], Awaitable[Json]]
"""Sends a POST to a route of SGLang; returns its JSON answer, whatever its status."""


class SchedulerStager(Stager):
    """Gives orders to the schedulers: one, or one of each data-parallel replica."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def can_stage(self) -> None:
        """Raise CannotPrepare when the schedulers do not take our orders."""
        await self._order("staged")

    async def stage(self, folder: Path, order: Order) -> Digests | None:
        """Load the folder in all ranks. Raises EngineError when one has failed."""
        body = {"name": order.name, "folder": str(folder), "digests": order.digests}
        states = await self._order("stage", body)
        while any(state["state"] == PreparationState.STAGING for state in states):
            await asyncio.sleep(POLL_S)
            states = await self._order("staged")
        for state in states:
            if state["state"] != PreparationState.READY or state["name"] != order.name:
                raise EngineError(f"{order.name} was not staged: {state['error'] or state['state']}")
        if not order.digests:
            return None
        return [rank for replica in await self._order("digests") for rank in replica["ranks"]]

    async def swap(self, order: Swap) -> float:
        """Exchange the weights in all replicas."""
        answers = await self._order("swap", order.model_dump(mode="json"))
        errors = [str(found["error"]) for found in answers if found["swapped"] is not True]
        if not errors:
            await self._label(str(order.version))
            return max(float(found["swap_s"]) for found in answers)
        if all(found["swapped"] is False for found in answers):
            raise NotPrepared(errors[0])
        await self._label(UNDEFINED)
        raise EngineError(f"{order.name} is not in all ranks: {errors[0]}")

    async def discard(self) -> None:
        """Forget what is staged; returns when no thread writes to it."""
        states = await self._order("discard")
        while any(state["state"] == PreparationState.STAGING for state in states):
            await asyncio.sleep(POLL_S)
            states = await self._order("staged")

    async def _label(self, label: str) -> None:
        await self._ask("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def _order(self, name: str, body: Json | None = None) -> list[Json]:
        """Give an order; returns the answer of each replica. Raises CannotPrepare when one does not take it."""
        action = f"{PREFIX}{name}" if body is None else f"{PREFIX}{name} {json.dumps(body)}"
        answer = await self._ask("/weights_checker", {"action": action})
        message = str(answer.get("message"))
        if answer.get("success") is not True:
            raise CannotPrepare(message)
        return answers_in(message)


def answers_in(message: str) -> list[Json]:
    """The JSON objects of a message, which SGLang joins with ` | `. Raises EngineError for another text."""
    decoder, found, at = json.JSONDecoder(), [], 0
    try:
        while at < len(message):
            value, at = decoder.raw_decode(message, at)
            found.append(value)
            at += len(" | ")
    except ValueError as error:
        raise EngineError(f"a scheduler answered {message[:200]!r}") from error
    return found


def ask_app(app: Any) -> Ask:
    """Requests to an ASGI application in this process."""

    async def ask(path: str, body: Json) -> Json:
        data, received = json.dumps(body).encode(), bytearray()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal data
            if data:
                body, data = data, b""
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            received.extend(message.get("body", b""))

        await app(scope, receive, send)
        try:
            answer = json.loads(bytes(received))
        except ValueError as error:
            raise EngineError(f"{path} answered {bytes(received[:200])!r}") from error
        return answer if isinstance(answer, dict) else {}

    return ask
