"""Open dashboards: each signs in, opens the run's page, listens for changes, and reads the page again after each.

    python -m dashboards.viewers http://127.0.0.1:8080 KEY bench 10

Prints one line of JSON when its input ends: the pages read, and the seconds that each took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx


async def view(url: str, key: str, run: str, took: list[float]) -> None:
    """One open page, as `page.js` and `charts.js` keep it up to date."""
    limits = httpx.Limits(max_connections=4)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, headers={"accept": "text/html"}) as http:
        answer = await http.post("/ui/sign-in", data={"key": key})
        assert answer.status_code == 303, answer.text
        last = await read(http, run, 0, took)
        async with http.stream("GET", f"/ui/runs/{run}/live") as events:
            async for line in events.aiter_lines():
                if line == "event: changed":
                    last = await read(http, run, last, took)


async def read(http: httpx.AsyncClient, run: str, after: int, took: list[float]) -> int:
    """Read the page and the new steps; returns the newest step."""
    began = time.perf_counter()
    page = await http.get(f"/ui/runs/{run}")
    series = await http.get(f"/ui/runs/{run}/series.json?after={after}")
    took.append(time.perf_counter() - began)
    assert page.status_code == series.status_code == 200, (page.status_code, series.status_code)
    return max([after, *series.json()["step"]])


async def main() -> None:
    """View until the input ends."""
    url, key, run, viewers = sys.argv[1:]
    took: list[float] = []
    tasks = [asyncio.create_task(view(url, key, run, took)) for _ in range(int(viewers))]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()  # a viewer never ends by itself
        task.cancel()
    print(json.dumps({"read": len(took), "took_s": took}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
