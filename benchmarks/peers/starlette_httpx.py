"""A program: the simplest pass-through, with Starlette as the server and httpx as the client.

    python starlette_httpx.py ENGINE_URL PORT

It parses nothing and records nothing. For speed it has uvloop, httptools, sniffio and no limit on connections.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

ENGINE, PORT = sys.argv[1], int(sys.argv[2])
HEADERS = {"content-type": "application/json"}


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Open one client for all calls."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=ENGINE, timeout=None, limits=limits) as app.state.http:
        yield


async def pass_on(request: Request) -> Response:
    """Pass on the engine's answer as it arrives."""
    http: httpx.AsyncClient = request.app.state.http
    asked = http.build_request("POST", request.url.path, content=await request.body(), headers=HEADERS)
    answer = await http.send(asked, stream=True)
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        close = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, {"content-type": kind}, background=close)
    return Response(await answer.aread(), answer.status_code, {"content-type": kind})


app = Starlette(routes=[Route("/v1/chat/completions", pass_on, methods=["POST"])], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, port=PORT, loop="uvloop", http="httptools", access_log=False, log_level="warning", backlog=2048)
