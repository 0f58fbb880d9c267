"""Measures the CPU of a call to the engine with each client library.

    python benchmarks/wire.py --out benchmarks/results/wire.json

A program stands in for the engine: it answers each `POST /generate` with 300 tokens, in one event or in 300 events a
millisecond apart. This process sends the calls, 32 at a time, over kept connections, and reads each answer to its end
without parsing it. The variants take turns: `agentrl.engine.wire`, httpcore and aiohttp. Each streams an answer on
uvloop, as its documentation says. A figure is this process's CPU time over the number of calls.

- `whole/VARIANT`: the answer is one event, as for an agent that does not stream.
- `stream/VARIANT`: the answer is one event per token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import harness
import httpcore
import orjson
import uvloop
from peers import payload
from peers.variants import ended, start_engine, until_answering
from turns import long_model

from agentrl.engine.server_process import free_port
from agentrl.engine.wire import Wire

IN_FLIGHT = 32
TIMEOUT_S = 60.0
TOKENS_PER_EVENT = {"whole": 1_000_000, "stream": 1}
JSON = {"Content-Type": "application/json"}
Call = Callable[[bytes], Awaitable[int]]
"""Sends a body and reads the answer; returns its size in bytes."""


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Call]:
    """Calls by `agentrl.engine.wire`."""
    connections = Wire(url)

    async def call(body: bytes) -> int:
        response = await connections.post("/generate", body, {}, TIMEOUT_S)
        size = 0
        while data := await response.more():
            size += len(data)
        connections.release(response, ending=True)
        return size

    yield call
    connections.close()


@asynccontextmanager
async def over_httpcore(url: str) -> AsyncIterator[Call]:
    """Calls by httpcore's connection pool."""
    async with httpcore.AsyncConnectionPool(max_connections=IN_FLIGHT) as pool:

        async def call(body: bytes) -> int:
            timeouts = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)}
            async with pool.stream(
                "POST", f"{url}/generate", headers=JSON, content=body, extensions=timeouts
            ) as response:
                return sum([len(data) async for data in response.aiter_stream()])

        yield call


@asynccontextmanager
async def over_aiohttp(url: str) -> AsyncIterator[Call]:
    """Calls by aiohttp's client session."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as http:

        async def call(body: bytes) -> int:
            async with http.post(f"{url}/generate", data=body, headers=JSON) as response:
                return sum([len(data) async for data in response.content.iter_any()])

        yield call


VARIANTS = {"wire": wire, "httpcore": over_httpcore, "aiohttp": over_aiohttp}


async def round_of(variant: str, url: str, body: bytes, calls: int) -> float:
    """Run one round; returns milliseconds of CPU per call."""
    async with VARIANTS[variant](url) as call:
        await asyncio.gather(*[call(body) for _ in range(IN_FLIGHT)])  # connects
        started = time.process_time()
        sizes = await asyncio.gather(*[_shortest(call, body, calls // IN_FLIGHT) for _ in range(IN_FLIGHT)])
        used = time.process_time() - started
    if min(sizes) == 0:
        sys.exit(f"{variant}: an answer was empty")
    return 1000 * used / (calls // IN_FLIGHT * IN_FLIGHT)


async def _shortest(call: Call, body: bytes, count: int) -> int:
    """Make `count` calls one after another; returns the size of the shortest answer."""
    return min([await call(body) for _ in range(count)])


def measure(report: harness.Report, url: str, options: argparse.Namespace) -> None:
    """Measure both kinds of answers with every variant."""
    for kind, interval in TOKENS_PER_EVENT.items():
        body = orjson.dumps(
            {
                "rid": "0" * 32,
                "input_ids": list(range(2000)),
                "sampling_params": {"stream_interval": interval},
                "return_logprob": True,
                "stream": True,
            }
        )
        variants = {name: partial(_run, name, url, body, options.calls) for name in VARIANTS}
        report.compare(kind, harness.interleave(variants, options.rounds), "ms", "wire")


def _run(variant: str, url: str, body: bytes, calls: int) -> float:
    return uvloop.run(round_of(variant, url, body, calls))


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 7, "rounds of each variant"), calls=(int, 640, "calls of a variant in a round")
    )
    report = harness.Report("wire")
    report.notes |= {"in_flight": IN_FLIGHT, "calls": options.calls, "httpcore": httpcore.__version__}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        replies = Path(folder) / "payload.json"
        payload.write(long_model(Path(folder) / "model", "chatml"), replies)
        port = free_port()
        stack.enter_context(ended(start_engine(replies, port)))
        until_answering(port, None)
        measure(report, f"http://127.0.0.1:{port}", options)
    harness.finish(report, options.out)


if __name__ == "__main__":
    main()
