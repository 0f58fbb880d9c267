"""Completes FastAPI's /openapi.json: the model routes, the keys, and every error in the caller's dialect.

Bodies of model routes are generated from the structs that decode them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import msgspec
from fastapi import FastAPI

from agentrl.domain.schemas import Json
from agentrl.proxy.dialects import DIALECTS, MESSAGES, of_request
from agentrl.proxy.dialects.anthropic.message_request import CountBody
from agentrl.proxy.dialects.responses.output_items import ENCRYPTED, LOGPROBS
from agentrl.proxy.routes.response_routes import LONGEST_PAGE

PREFIXES = ("", "/sessions/{session_id}")
COUNT, MODELS, RESPONSE = "/v1/messages/count_tokens", "/v1/models", "/v1/responses/{response_id}"
OPEN_ROUTES = ("/health",)
ERRORS = {
    400: "The body is malformed, a model call's parameter wrong or not supported, its conversation too long.",
    401: "No key, or one that is not valid.",
    403: "The key may not do this, or belongs to another session.",
    404: "There is no such session, call, model or run.",
    409: "The session has ended, the run is finished, or the state forbids it.",
    413: "The body is too large.",
    422: "A parameter of another route is wrong.",
    429: "Not now: try again after `Retry-After`.",
    502: "The engine, or the other model, failed.",
    503: "No engine serves, or the database is away: try again after `Retry-After`.",
    504: "It took too long.",
}
OF_MODELS = (400, 401, 403, 404, 409, 413, 429, 502, 503, 504)
OF_OTHERS = (400, 401, 403, 404, 409, 413, 422, 429, 502, 503)
TEXT: Json = {"type": "string"}
EVENT: Json = {"type": "object", "required": ["data"], "properties": {"event": TEXT, "data": TEXT}}
NAMED: Json = {"anyOf": [TEXT, {"type": "null"}]}
SCHEMAS: Json = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": TEXT, "type": TEXT, "param": NAMED, "code": TEXT},
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}},
        },
    },
}
ERRORS_OF = {"anthropic.messages": "AnthropicError"}
"""Name of a dialect → the schema of its errors. Other dialects use OpenAI's schema."""
KEYS: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
SESSION_ID: Json = {"name": "session_id", "in": "path", "required": True, "schema": TEXT}
RESPONSE_ID: Json = {"name": "response_id", "in": "path", "required": True, "schema": TEXT}
INCLUDE: Json = {
    "name": "include",
    "in": "query",
    "schema": {"type": "array", "items": {"enum": [LOGPROBS, ENCRYPTED]}},
}
PAGING: list[Json] = [
    {"name": "after", "in": "query", "schema": TEXT},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": LONGEST_PAGE}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
]
MODEL: Json = {"name": "model", "in": "path", "required": True, "schema": TEXT}
SESSION_HEADER: Json = {
    "name": "x-session-id",
    "in": "header",
    "schema": TEXT,
    "description": "The session of a call that is made with a run key.",
}
TURN_HEADER: Json = {
    "name": "x-turn-type",
    "in": "header",
    "schema": {"enum": ["main", "side", "subagent"]},
    "description": "What the call is to its episode.",
}


def install(app: FastAPI) -> None:
    """Complete the app's description when it is first requested."""
    generated = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            complete(generated())
        schema: Json | None = app.openapi_schema
        assert schema is not None
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def complete(schema: Json) -> None:
    """Add the model routes, keys and errors to FastAPI's description of the other routes."""
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for of_fastapi in ("HTTPValidationError", "ValidationError"):
        schemas.pop(of_fastapi, None)
    shapes = [dialect.body for dialect in DIALECTS.values()] + [CountBody]
    refs, found = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    schemas |= SCHEMAS | found
    components["securitySchemes"] = KEYS
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            if path not in OPEN_ROUTES:
                _guard(path, operation, OF_OTHERS)
    for path, method, operation in _model_routes(refs):
        reads = (401, 403, 404, 503) if MODELS in path else (400, 401, 403, 404, 503)
        _guard(path, operation, OF_MODELS if method == "post" else reads)
        schema["paths"].setdefault(path, {})[method] = operation


def _model_routes(bodies: tuple[Json, ...]) -> Iterator[tuple[str, str, Json]]:
    *of_dialects, of_count = bodies
    for prefix in PREFIXES:
        headers = [SESSION_ID if prefix else SESSION_HEADER]
        for (path, dialect), body in zip(DIALECTS.items(), of_dialects, strict=True):
            asked = [*headers, TURN_HEADER]
            yield prefix + path, "post", _operation(inspect.getdoc(dialect) or path, asked, body, streamed=True)
        counted = inspect.getdoc(MESSAGES.encode_count) or COUNT
        yield prefix + COUNT, "post", _operation(counted, headers, of_count)
        in_path = headers[: bool(prefix)]
        yield prefix + MODELS, "get", _operation("The models that calls may name.", in_path)
        yield (
            f"{prefix}{MODELS}/{{model}}",
            "get",
            _operation("One of these models.", [*in_path, MODEL]),
        )
        named = [*headers, RESPONSE_ID]
        yield prefix + RESPONSE, "get", _operation("A stored response.", [*named, INCLUDE])
        yield prefix + RESPONSE, "delete", _operation("Delete a response; the recorded call stays.", named)
        yield f"{prefix}{RESPONSE}/input_items", "get", _operation("The input items of a response.", [*named, *PAGING])


def _operation(summary: str, parameters: list[Json], body: Json | None = None, *, streamed: bool = False) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if streamed:
        content["text/event-stream"] = {"schema": EVENT}
    operation: Json = {
        "tags": ["model"],
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _guard(path: str, operation: Json, statuses: tuple[int, ...]) -> None:
    """Add the keys that a route takes, and the errors that it may answer."""
    name = ERRORS_OF.get(of_request(path, {}).name, "OpenAIError")
    shape = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    operation["security"] = [{scheme: []} for scheme in KEYS]
    operation["responses"] |= {str(status): {"description": ERRORS[status], "content": shape} for status in statuses}
