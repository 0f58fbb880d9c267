"""Measures the dashboard: the server's time for each page of a large run, what open pages cost the recording, and the
token view of a long trajectory.

    python benchmarks/dashboard.py pages --database-url sqlite:////tmp/big.db
    python benchmarks/dashboard.py recording --viewers 10
    python benchmarks/dashboard.py tokens

- `page/NAME`: seconds from the request to the last byte of a page, over HTTP on one connection. Each request has an
  address of its own, so that none is answered by a page that was made a moment ago. `benchmarks/dashboards/
  generated_run.py` makes the run.
- `recording/quiet`, `recording/watched`: calls per second that the proxy records, alternately without and with open
  dashboards, with an engine that answers at once (so that the proxy is the limit). The viewers are programs that send
  what a browser sends (`dashboards/viewers.py`).
- `tokens/open`, `tokens/scroll`: seconds until the tokens of a trajectory of 131,072 are drawn in Chromium, and frames
  per second while it scrolls.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import harness
import httpx
import uvicorn
from dashboards.long_trajectory import filled
from dashboards.visited_pages import pages_of
from peers.rounds import Bench, Case
from peers.variants import ended
from playwright.sync_api import sync_playwright
from turns import long_model

from agentrl.dashboard import own_server
from agentrl.engine.server_process import free_port
from agentrl.store import Database

KEY = "arl-ui-benchmark"
TOKENS = 131_072
SCROLL = """() => new Promise((done) => {
  const view = document.getElementById("view"), began = performance.now();
  let frames = 0;
  const next = (now) => {
    view.scrollTop += 400;
    frames += 1;
    if (now - began < 2000) requestAnimationFrame(next);
    else done(1000 * frames / (now - began));
  };
  requestAnimationFrame(next);
})"""
SESSIONS, TURNS = 640, 5
"""Of one round: several seconds, in which the pages are read several times."""


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pages", "recording", "tokens"])
    parser.add_argument("--database-url", help="of the generated run, for `pages`")
    parser.add_argument("--requests", type=int, default=40, help="of each page (40)")
    parser.add_argument("--viewers", type=int, default=10, help="open dashboards (10)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of rounds, quiet and watched (7)")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    name = f"dashboard_{options.what}"
    if options.what == "pages":
        if not options.database_url:
            parser.error("pages: give --database-url")
        name += f"_{options.database_url.partition(':')[0]}"
    report = harness.Report(name)
    if options.what == "pages":
        pages(report, options)
    elif options.what == "recording":
        recording(report, options)
    else:
        tokens(report, options)
    harness.finish(report, options.out)


def pages(report: harness.Report, options: argparse.Namespace) -> None:
    """The time of each page: median and 95th percentile."""
    database = Database(options.database_url)
    with served(database) as url, httpx.Client(base_url=url, timeout=120) as http:
        assert http.post("/ui/sign-in", data={"key": KEY}).status_code == 303
        for name, addresses in pages_of(database, options.requests).items():
            http.get(addresses[0])  # warm
            took = [
                timed(http, f"{address}{'&' if '?' in address else '?'}_={n}") for n, address in enumerate(addresses)
            ]
            report.add(f"page/{name}", [1000 * each for each in took], "ms")
            report.add(f"page/{name}/p95", [1000 * sorted(took)[math.ceil(0.95 * len(took)) - 1]], "ms")
    database.close()


def timed(http: httpx.Client, address: str) -> float:
    """Seconds of one request."""
    began = time.perf_counter()
    answer = http.get(address)
    took = time.perf_counter() - began
    assert answer.status_code == 200, (address, answer.status_code, answer.text[:300])
    return took


@contextmanager
def served(database: Database) -> Iterator[str]:
    """The dashboard of a database, in a thread."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(own_server.application(database, KEY), port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def recording(report: harness.Report, options: argparse.Namespace) -> None:
    """Calls per second, quiet and watched in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(folder, long_model(folder / "model", "chatml"), ["agentrl"])
        with bench.running():
            (variant,) = bench.variants
            case = Case("recording", 32)
            bench.round(variant, case, SESSIONS, TURNS)  # warm up
            rates: dict[str, list[float]] = {"quiet": [], "watched": []}
            read, took = 0, []
            for _ in range(options.rounds):
                rates["quiet"].append(bench.round(variant, case, SESSIONS, TURNS)[1]["rate"])
                with viewers(f"http://127.0.0.1:{variant.port}", options.viewers) as found:
                    rates["watched"].append(bench.round(variant, case, SESSIONS, TURNS)[1]["rate"])
                read, took = read + found["read"], took + found["took_s"]
            report.add("recording/quiet", rates["quiet"], "calls/s")
            report.add("recording/watched", rates["watched"], "calls/s", "recording/quiet")
            report.notes |= {"viewers": options.viewers, "pages read": read, "median page s": round(median(took), 3)}


def tokens(report: harness.Report, options: argparse.Namespace) -> None:
    """Open and scroll the token view in Chromium."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        database = Database(f"sqlite:///{name}/long.db")
        database.upgrade()
        page_of = f"/ui/sessions/{filled(database, TOKENS)}/tokens"
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        with served(database) as url:
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            page.goto(f"{url}/ui/sign-in#{KEY}")
            page.wait_for_url(f"{url}/ui/")
            opened, frames = [], []
            for n in range(1 + options.rounds):  # the first one warms up
                began = time.perf_counter()
                page.goto(f"{url}{page_of}?_={n}")
                page.wait_for_selector(".token")
                opened.append(time.perf_counter() - began)
                frames.append(page.evaluate(SCROLL))
        browser.close()
        database.close()
        report.notes["tokens"] = TOKENS
        report.add("tokens/open", opened[1:], "s")
        report.add("tokens/scroll", frames[1:], "frames/s")


@contextmanager
def viewers(url: str, n: int) -> Iterator[dict[str, object]]:
    """Open dashboards while the block runs; the result has what they read."""
    argv = [sys.executable, "-m", "dashboards.viewers", url, "run-key", "bench", str(n)]
    process = subprocess.Popen(argv, cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    found: dict[str, object] = {}
    with ended(process):
        time.sleep(2)  # until all are open
        yield found
        out, _ = process.communicate(timeout=30)
        found |= json.loads(out)


if __name__ == "__main__":
    main()
