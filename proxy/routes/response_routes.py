"""Stored responses: GET and DELETE /v1/responses/ID, and the input items of a response.

The store holds the request and the sampled output. The request is reconstructed, and its answer is encoded again.
"""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.calls import recorded_answers
from agentrl.proxy.calls.prompts.prompt_lengths import written
from agentrl.proxy.dialects import RESPONSES
from agentrl.proxy.dialects.model_answer import Answer
from agentrl.proxy.dialects.parameter_errors import unsupported
from agentrl.proxy.dialects.responses.recorded_items import items_of
from agentrl.proxy.dialects.responses.response_tools import response_tools
from agentrl.proxy.dialects.responses.responses_dialect import NAMESPACES, PREVIOUS
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.model_routes import slot_for
from agentrl.proxy.run_store import RunStore
from agentrl.rendering.messages import text_of
from agentrl.store.calls import response_records
from agentrl.store.calls.conversations import Conversation

PAGE = 20
LONGEST_PAGE = 100


async def retrieve(request: Request) -> Response:
    """A response of the session as it was answered, with the additions of `include`. Raises RequestError."""
    context = app_parts.context(request)
    session_id, call_id = await _named(request)
    query = _query(request, "include")
    async with slot_for(context.sessions, session_id):
        found = await _find(context.store, session_id, call_id)
        asked = RESPONSES.decode(orjson.dumps(_body(found, query.get("include", []))))
        header, events = await recorded_answers.load(context, session_id, asked, [call_id])
        return _json(RESPONSES.encode(asked, header, [event for _, event in events if isinstance(event, Answer)]))


async def input_items(request: Request) -> Response:
    """A page of a response's input items, those of earlier responses included. Raises RequestError."""
    context = app_parts.context(request)
    session_id, call_id = await _named(request)
    query = {name: values[-1] for name, values in _query(request, "after", "limit", "order").items()}
    limit, order, after = query.get("limit", str(PAGE)), query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise bad_parameter("order", f"order must be asc or desc, got {order!r}")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 9 and 1 <= int(limit) <= LONGEST_PAGE):
        raise bad_parameter("limit", f"limit must be from 1 to {LONGEST_PAGE}, got {limit[:20]!r}")
    async with slot_for(context.sessions, session_id):
        found = await _find(context.store, session_id, call_id)
        items = await context.heavy.run(session_id, written(found.all), _items, found)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_parameter("after", f"after: this response has no input item {after!r}")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    has_more = start + len(page) < len(items)
    return _json(orjson.dumps({"object": "list", "data": page, **ends, "has_more": has_more}))


async def delete(request: Request) -> Response:
    """Delete a response for its client. The recorded call stays, and is trained. Raises RequestError."""
    session_id, call_id = await _named(request)
    _query(request)
    if not await app_parts.store(request).write(response_records.delete, session_id, call_id):
        raise _unknown(session_id, f"resp_{call_id}")
    return _json(orjson.dumps({"id": f"resp_{call_id}", "object": "response", "deleted": True}))


async def _named(request: Request) -> tuple[str, str]:
    """The session, and the call that the path names. Raises RequestError."""
    session_id = await app_parts.finder(request).of_call(request)
    named: str = request.path_params["response_id"]
    found = PREVIOUS.fullmatch(named)
    if found is None:
        raise _unknown(session_id, named)
    return session_id, found[1]


async def _find(store: RunStore, session_id: str, call_id: str) -> Conversation:
    found = await store.read(response_records.find, session_id, call_id)
    if found is None:
        raise _unknown(session_id, f"resp_{call_id}")
    return found


def _unknown(session_id: str, named: str) -> RequestError:
    message = f"session {session_id} has no response {named!r}"
    return RequestError(404, message, code="response_not_found", param="response_id")


def _query(request: Request, *known: str) -> dict[str, list[str]]:
    """Values by name; a list may be spelled `name[]`. Raises RequestError 400 for a name that is not `known`."""
    found: dict[str, list[str]] = {}
    for spelled, value in request.query_params.multi_items():
        name = spelled.removesuffix("[]")
        if name not in known:
            raise unsupported(name, f"parameter {name!r} is not supported here")
        found.setdefault(name, []).append(value)
    return found


def _body(found: Conversation, include: list[str]) -> Json:
    """The request body, with a placeholder as input: it is only decoded, never sampled."""
    asked: Json = {**found.options[response_records.ASKED]}
    asked.pop(NAMESPACES, None)
    instructions = text_of(found.system[0]) if found.options.get("has_instructions") else None
    return asked | {
        "input": "-",
        "instructions": instructions,
        "tools": _tools(found),
        "include": [*asked.get("include", []), *include],
    }


def _items(found: Conversation) -> list[Json]:
    """The messages before the answer as items, without the instructions."""
    return items_of(found.all[bool(found.options.get("has_instructions")) : -1], found.call_id, _tools(found))


def _tools(found: Conversation) -> list[Json]:
    """The tools of the call, in their namespaces."""
    return response_tools(found.tools, found.options[response_records.ASKED].get(NAMESPACES, []))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
