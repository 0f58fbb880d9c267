"""Calls that run on engines all the time, in a process of their own, and the times between their tokens."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import aiohttp

from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_connections import EngineConnections
from agentrl.engine.engine_keys import EngineKeys
from agentrl.errors import EngineError

PROMPT, OUTPUT = 32, 256
FIRST_IDS = 64
"""Prompts are drawn from token ids below this."""
STOP_S = 20.0


@dataclass(frozen=True)
class Gaps:
    """The times of tokens of all streams: when each came (monotonic), and seconds since the one before it."""

    ended_at: list[float]
    seconds: list[float]

    @classmethod
    def read(cls, path: Path) -> Gaps:
        """Read the gaps that the process has written so far."""
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return cls([row[0] for row in rows], [row[1] for row in rows])

    def during(self, start: float, end: float) -> list[float]:
        """The gaps that overlap with an interval."""
        return [s for at, s in zip(self.ended_at, self.seconds, strict=True) if at >= start and at - s <= end]

    def step_s(self, intervals: list[tuple[float, float]]) -> float:
        """The median gap outside of some intervals: a decode step."""
        return median(
            s
            for at, s in zip(self.ended_at, self.seconds, strict=True)
            if not any(at >= start and at - s <= end for start, end in intervals)
        )


@contextmanager
def streams(urls: list[str], each: int, out: Path) -> Iterator[None]:
    """Run `each` calls on each engine, one after another, until the block ends; writes the gaps to `out`."""
    argv = [sys.executable, __file__, str(each), str(out), *urls]
    process = subprocess.Popen(argv)
    try:
        yield
    finally:
        process.terminate()
        process.wait(STOP_S)


async def main(each: int, out: Path, urls: list[str]) -> None:
    """Run calls until the process is ended."""
    numbers = count()
    with out.open("w") as file:
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            connections = EngineConnections(http, EngineKeys(), "sglang")
            for url in urls:
                client = connections.listed(url)
                for seed in range(each):
                    group.create_task(stream(client, seed, numbers, file))


async def stream(client: EngineClient, seed: int, numbers: Iterator[int], file: object) -> None:
    """Make calls, one after another."""
    draw = random.Random(seed)
    params = {"max_new_tokens": OUTPUT, "temperature": 1.0, "ignore_eos": True}
    while True:
        prompt = [draw.randrange(FIRST_IDS) for _ in range(PROMPT)]
        last: float | None = None
        try:
            async for chunk in client.generate(rid=f"s{next(numbers):08}", input_ids=prompt, sampling_params=params):
                now = time.monotonic()
                if last is not None and chunk.output_ids:
                    print(json.dumps([now, now - last]), file=file, flush=True)
                last = now
        except EngineError:
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
