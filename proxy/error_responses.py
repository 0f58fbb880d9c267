"""Error handlers: every error is answered in the caller's dialect."""

from __future__ import annotations

import logging

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrl.errors import FencedError, RequestError, StoreError, ValueRefused
from agentrl.proxy import dialects
from agentrl.proxy.dialects.statuses import headers_of
from agentrl.proxy.routes import app_parts, unknown_routes

log = logging.getLogger(__name__)
AREAL_PATHS = frozenset(
    {"/grant_capacity", "/rl/start_session", "/rl/set_reward", "/rl/end_session", "/export_trajectories"}
)
"""Here an error has AReaL's field `detail` in addition to this proxy's fields."""


def install(app: FastAPI) -> None:
    """Add the handlers to `app`."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(FencedError, _on_fenced_error)
    app.add_exception_handler(ValueRefused, _on_value_refused)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


def _response(request: Request, error: RequestError) -> Response:
    """The error in the caller's dialect."""
    dialect = dialects.of_request(request.url.path, request.headers)
    status, headers = dialect.status(error), headers_of(error)
    app_parts.metrics(request).refused(status, error.code)
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body may never come
    body = dialect.encode_error(error)
    if request.url.path in AREAL_PATHS:
        shown = orjson.loads(body)
        body = orjson.dumps({"detail": shown["error"]["message"], **shown})
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    await app_parts.refusals(request).record(request, error)
    return _response(request, error)


async def _on_store_error(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return _response(request, RequestError(503, str(error), code="store_unavailable", retry_after_s=1.0))


async def _on_value_refused(request: Request, error: Exception) -> Response:
    return _response(request, RequestError(400, f"this cannot be stored: {error}", code="invalid_parameter"))


async def _on_fenced_error(request: Request, error: Exception) -> Response:
    return _response(request, RequestError(409, str(error), code="epoch_over"))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return _response(request, RequestError(400, "the body is not valid JSON", code="invalid_json"))
    message = f"{where or 'the body'}: {first['msg']}"
    return _response(request, RequestError(422, message, code="invalid_parameter", param=where or None))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:  # only raised where no route matches
        return await _on_request_error(request, unknown_routes.no_route(request))
    return _response(request, RequestError(error.status_code, str(error.detail), code="http_error"))
