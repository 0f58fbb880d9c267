"""Sends a slice of the requests of extremes.py from one session, AT_ONCE at a time; prints a summary as JSON.

    AGENTRL_SESSION_KEY=… python benchmarks/attacker.py BASE_URL SEED FIRST COUNT AT_ONCE

benchmarks/hostile.py runs this in a separate process, so that making and sending large bodies does not slow the calls
whose latency it measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from itertools import islice

import aiohttp
import extremes

TIMEOUT_S = 120.0
OWN = (429, 500, 502, 503, 504)
"""Statuses that are counted separately; the others are counted by class."""
SLOWEST = 10


async def main(where: str, seed: int, first: int, count: int, at_once: int) -> None:
    """Send `count` requests of the seed, from number `first` on."""
    asked = list(islice(extremes.requests(seed, first + count), first, None))
    headers = {"Authorization": f"Bearer {os.environ['AGENTRL_SESSION_KEY']}", "Content-Type": "application/json"}
    statuses: Counter[str] = Counter()
    odd: list[str] = []
    slowest: list[tuple[float, str]] = []
    left = iter(asked)
    started = time.monotonic()

    async def one(http: aiohttp.ClientSession) -> None:
        for path, body in left:
            began = time.monotonic()
            try:
                async with http.post(where + path, data=body, headers=headers) as answer:
                    status, said = answer.status, await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                status, said = 0, repr(error)
            known = str(status) if status in OWN else f"{status // 100}xx" if status else "none"
            statuses[known] += 1
            shown = f"{status} {path} {len(body)} bytes {body[:200]!r} {said[:200]}"
            slowest.append((time.monotonic() - began, shown))
            if status in OWN or not status:
                odd.append(shown)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
        await asyncio.gather(*(one(http) for _ in range(at_once)))
    slowest.sort(reverse=True)
    result = {"statuses": statuses, "odd": odd, "slowest": slowest[:SLOWEST], "seconds": time.monotonic() - started}
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
