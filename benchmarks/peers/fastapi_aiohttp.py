"""A program: a pass-through with FastAPI as the server and aiohttp as the client.

python fastapi_aiohttp.py ENGINE_URL PORT
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

ENGINE, PORT = sys.argv[1], int(sys.argv[2])
HEADERS = {"content-type": "application/json"}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open one client for all calls."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as app.state.http:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/v1/chat/completions")
async def pass_on(request: Request) -> Response:
    """Pass on the engine's answer as it arrives."""
    http: aiohttp.ClientSession = request.app.state.http
    answer = await http.post(ENGINE + request.url.path, data=await request.body(), headers=HEADERS)
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        return StreamingResponse(pieces(answer), answer.status, {"content-type": kind})
    return Response(await answer.read(), answer.status, {"content-type": kind})


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The parts of the answer as they arrive."""
    async with answer:
        async for piece in answer.content.iter_any():
            yield piece


if __name__ == "__main__":
    uvicorn.run(app, port=PORT, loop="uvloop", http="httptools", access_log=False, log_level="warning", backlog=2048)
