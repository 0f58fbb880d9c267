"""What recording costs: CPU per call of the proxy, fully durable, in front of a fake engine that answers at once.

    python benchmarks/proxy.py --out benchmarks/results/proxy.json

Each call has 200 prompt characters and 64 output tokens with logprobs, on a session of its own. Rounds of the variants
are interleaved; a figure is the median over rounds of the proxy process's CPU time divided by its calls.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import harness
import psutil
from proxied import RUN, start_proxy, until_healthy

from agentrl.engine.server import free_port
from agentrl.models import resolve_model
from agentrl.testing import FakeEngine

OUTPUT = [100, *range(70, 132), 2]


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 5, "rounds of each variant"), calls=(int, 256, "calls of one round")
    )
    report = harness.Report("proxy")
    with tempfile.TemporaryDirectory() as folder, FakeEngine(lambda ids, params: OUTPUT) as engine:
        asyncio.run(measure(report, Path(folder), engine, options.rounds, options.calls))
    harness.finish(report, options.out)


async def measure(report: harness.Report, folder: Path, engine: FakeEngine, rounds: int, calls: int) -> None:
    """CPU per call at 1, 8 and 32 calls in flight, whole and streamed."""
    port = free_port()
    url, proxy = f"http://127.0.0.1:{port}", start_proxy(folder, engine.url, port, resolve_model("tiny"))
    variants = [(n, stream) for n in (1, 8, 32) for stream in (False, True)]
    samples: dict[tuple[int, bool], list[float]] = {variant: [] for variant in variants}
    try:
        async with aiohttp.ClientSession() as http:
            await until_healthy(http, url, proxy)
            for round_ in range(rounds + 1):
                for variant in variants:
                    cost = await one_round(http, url, proxy, *variant, calls)
                    if round_:  # the first round warms up
                        samples[variant].append(cost)
    finally:
        proxy.terminate()
        proxy.wait(20)
    named = {f"c{n}{'/stream' if stream else ''}": costs for (n, stream), costs in samples.items()}
    report.compare("cpu_per_call/agentrl", named, "ms", base="c1")


async def one_round(
    http: aiohttp.ClientSession, url: str, proxy: subprocess.Popen[bytes], in_flight: int, stream: bool, calls: int
) -> float:
    """CPU milliseconds of the proxy per call."""
    opened = []
    for _ in range(in_flight):
        async with http.post(f"{url}/groups", json={"is_eval": True, "task": {}}, headers=RUN) as answer:
            opened.append((await answer.json())["sessions"][0])
    body = {"messages": [{"role": "user", "content": "abcde" * 40}], "max_tokens": 64, "stream": stream}
    process = psutil.Process(proxy.pid)

    async def worker(session: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        for _ in range(calls // in_flight):
            async with http.post(f"{session['base_url']}/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    before = process.cpu_times()
    await asyncio.gather(*(worker(session) for session in opened))
    after = process.cpu_times()
    used = (after.user + after.system) - (before.user + before.system)
    return 1000 * used / (calls // in_flight * in_flight)


if __name__ == "__main__":
    main()
