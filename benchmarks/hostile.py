"""Sends extreme requests to real SGLang with one session's key, and measures the effect on other sessions.

    python benchmarks/hostile.py --out benchmarks/results/hostile.json

A seeded stream of requests (extremes.py) at the limits of every dialect goes to a real proxy in front of real SGLang
with the tiny model, while other sessions make ordinary calls. Rounds with and without the hostile session alternate.

- `engine_deaths`, `statuses/500`: deaths of the server, and unexpected errors; both must be 0.
- `statuses/CLASS`: how the hostile requests were answered. 2xx: within the bounds, sampled. 4xx: refused by name.
- `latency_p95/quiet`, `latency_p95/hostile`: of the other sessions' calls; `hostile` may be at most twice `quiet`.
- `hostile_rate`: requests per second of the hostile session.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import harness
import numpy as np
from proxied import RUN, start_proxy, until_healthy

from agentrl.engine.engine_keys import new_key
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import free_port, launch
from agentrl.environment import ENGINE_KEY
from agentrl.models import resolve_model

ATTACKER = str(Path(__file__).with_name("attacker.py"))
ORDINARY = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 24}
TIMEOUT_S = 120.0
STOP_S = 20.0
WARM_UP_S = 3.0


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        count=(int, 2000, "hostile requests"),
        seed=(int, 0, "of the requests"),
        rounds=(int, 4, "quiet and hostile rounds"),
        others=(int, 4, "ordinary sessions, each with a call at a time"),
        at_once=(int, 2, "hostile requests at a time"),
        quiet_s=(float, 15.0, "seconds of a quiet round"),
    )
    report = harness.Report("hostile")
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(measure(Path(folder), options))
    report.add("engine_deaths", [float(seen.deaths)], "")
    for name in ("2xx", "4xx", "429", "500", "502", "503", "504", "none"):
        report.add(f"statuses/{name}", [float(seen.statuses[name])], "requests")
    for kind in ("quiet", "hostile"):
        base = None if kind == "quiet" else "latency_p95/quiet"
        report.add(f"latency_p95/{kind}", [1e3 * p95(each) for each in seen.latencies[kind]], "ms", base)
    report.add("hostile_rate", seen.rates, "requests/s")
    report.notes |= {"seed": options.seed, "at_once": options.at_once, "others": options.others, "odd": seen.odd[:20]}
    report.notes["slowest"] = sorted(seen.slowest, reverse=True)[:10]
    harness.finish(report, options.out)


def p95(seconds: list[float]) -> float:
    """The 95th percentile."""
    return float(np.percentile(seconds, 95))


@dataclass
class Seen:
    """The results of all rounds."""

    deaths: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[list[float]]] = field(default_factory=lambda: {"quiet": [], "hostile": []})
    rates: list[float] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)  # requests that got a 5xx, a 429 or nothing
    slowest: list[Any] = field(default_factory=list)  # (seconds, request and answer)


async def measure(folder: Path, options: Any) -> Seen:
    """Run all rounds."""
    model, port, key = resolve_model("tiny"), free_port(), new_key()
    engine = launch(EngineSpec(model=model, port=free_port(), log_file=folder / "engine.log", key=key))
    proxy = start_proxy(folder, [engine.url], port, model, more={ENGINE_KEY: key})
    seen, url = Seen(), f"http://127.0.0.1:{port}"
    try:
        await engine.wait_healthy()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
            await until_healthy(http, url, proxy)
            mine = await session(http, url)
            others = [await session(http, url) for _ in range(options.others)]
            await ordinary(http, others, asyncio.create_task(asyncio.sleep(WARM_UP_S)))
            count = options.count // options.rounds
            for turn in range(options.rounds):
                quiet = asyncio.create_task(asyncio.sleep(options.quiet_s))
                seen.latencies["quiet"].append(await ordinary(http, others, quiet))
                fire = asyncio.create_task(attack(mine, turn * count, count, options, seen))
                seen.latencies["hostile"].append(await ordinary(http, others, fire))
            seen.deaths += engine.returncode is not None
    finally:
        proxy.terminate()
        proxy.wait(STOP_S)
        engine.stop()
    return seen


async def session(http: aiohttp.ClientSession, url: str) -> tuple[str, dict[str, str]]:
    """Open a session whose sampling parameters are not forced; returns its address and the header with its key."""
    asked = {"is_eval": True, "task": {}, "sampling": {}}
    async with http.post(f"{url}/groups", json=asked, headers=RUN) as answer:
        opened = (await answer.json())["sessions"][0]
    return opened["base_url"], {"Authorization": f"Bearer {opened['api_key']}"}


async def ordinary(
    http: aiohttp.ClientSession, sessions: list[tuple[str, dict[str, str]]], until: asyncio.Task[None]
) -> list[float]:
    """Every session makes one call after another until the task is done; returns the seconds of each call."""
    seconds: list[float] = []

    async def one(where: str, headers: dict[str, str]) -> None:
        while not until.done():
            started = time.monotonic()
            async with http.post(f"{where}/chat/completions", json=ORDINARY, headers=headers) as answer:
                if answer.status != 200:
                    raise SystemExit(f"an ordinary call got {answer.status}: {await answer.text()}")
            seconds.append(time.monotonic() - started)

    await asyncio.gather(until, *(one(where, headers) for where, headers in sessions))
    return seconds


async def attack(mine: tuple[str, dict[str, str]], first: int, count: int, options: Any, seen: Seen) -> None:
    """Send the next `count` requests, from number `first` on, by attacker.py in a separate process."""
    where, headers = mine
    env = os.environ | {"AGENTRL_SESSION_KEY": headers["Authorization"].removeprefix("Bearer ")}
    words = [where, *map(str, (options.seed, first, count, options.at_once))]
    attacker = await asyncio.create_subprocess_exec(sys.executable, ATTACKER, *words, env=env, stdout=-1)
    out, _ = await attacker.communicate()
    found = json.loads(out)
    seen.statuses.update(found["statuses"])
    seen.odd += found["odd"]
    seen.slowest += found["slowest"]
    seen.rates.append(count / found["seconds"])


if __name__ == "__main__":
    main()
