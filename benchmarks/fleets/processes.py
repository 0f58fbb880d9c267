"""Real proxies over real sockets: many fake engines in one process answer what a probe asks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import proxied
import psycopg
from aiohttp import web

from agentrl.configs.run_config import RunConfig
from agentrl.engine.server_process import free_port
from agentrl.store import Database, runs
from agentrl.store.db.codec import new_id
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.session_limits import Limits

ADMIN = {"Authorization": "Bearer admin-key"}
IDLE_S = 10.0
SESSIONS, AT_ONCE = 100_000, 100
ADMISSIONS = 200
Measured = dict[str, tuple[list[float], str]]


@dataclass
class Engines:
    """Fake engines in this process: each a socket that answers probes."""

    requests: int = 0
    sites: dict[str, web.TCPSite] = field(default_factory=dict)
    _runner: web.AppRunner | None = None

    async def start(self, count: int) -> list[str]:
        """Start engines; their URLs."""
        if self._runner is None:
            app = web.Application()
            app.router.add_get("/model_info", self._model_info)
            app.router.add_get("/ready", self._ready)
            self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=0.5)
            await self._runner.setup()
        urls = []
        for _ in range(count):
            port = free_port()
            site = web.TCPSite(self._runner, "127.0.0.1", port)
            await site.start()
            urls.append(f"http://127.0.0.1:{port}")
            self.sites[urls[-1]] = site
        return urls

    async def kill(self, url: str) -> None:
        """Close an engine's socket; probes are refused from now on."""
        await self.sites.pop(url).stop()

    async def _model_info(self, request: web.Request) -> web.Response:
        self.requests += 1
        close = request.url.port is None or f"http://127.0.0.1:{request.url.port}" not in self.sites
        if close:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"model_path": "fake", "weight_version": "0"})

    async def _ready(self, request: web.Request) -> web.Response:
        self.requests += 1
        return web.json_response({})


def measure(database_url: str, folder: Path, n_proxies: int, n_engines: int) -> Measured:
    """Run the proxies, and measure."""
    env = os.environ | {"AGENTRL_DATABASE_URL": database_url, "AGENTRL_ADMIN_KEY": "admin-key"}
    urls, running = [], []
    with (folder / "log").open("wb") as log:
        for _ in range(n_proxies):
            port = free_port()
            argv = ["-m", "agentrl", "proxy", "--run", "bench", "--port", str(port), "--log-level", "warning"]
            running.append(subprocess.Popen([sys.executable, *argv], env=env, stdout=log, stderr=log))
            urls.append(f"http://127.0.0.1:{port}")
        try:
            return asyncio.run(_measured(database_url, urls, running, n_engines))
        finally:
            for proxy in running:
                proxy.terminate()
            for proxy in running:
                proxy.wait(30)


async def _measured(
    database_url: str, proxies: list[str], running: list[subprocess.Popen[bytes]], n_engines: int
) -> Measured:
    engines, found = Engines(), Measured()
    async with aiohttp.ClientSession() as http:
        for url, process in zip(proxies, running, strict=True):
            await proxied.until_healthy(http, url, process)
        names = await engines.start(n_engines)
        for url in names:
            await _join(http, proxies[0], url)
        await _until(lambda: _all(http, proxies, names[-1], 1.0))
        await asyncio.sleep(IDLE_S)
        engines.requests = 0
        before, cpu = _transactions(database_url), [proxied.cpu_s(process.pid) for process in running]
        started = time.monotonic()
        await asyncio.sleep(IDLE_S)
        took = time.monotonic() - started
        found["requests to engines"] = [engines.requests / took], "per s"
        found["transactions"] = [(_transactions(database_url) - before) / took], "per s"
        after = [proxied.cpu_s(process.pid) for process in running]
        found["CPU of a proxy"] = [(b - a) / took for a, b in zip(cpu, after, strict=True)], "cores"
        drops, sees = [], []
        for victim in names[:5]:
            await engines.kill(victim)
            drops.append(await _until(lambda u=victim: _all(http, proxies, u, 0.0)))
            (new,) = await engines.start(1)
            await _join(http, proxies[0], new)
            sees.append(await _until(lambda u=new: _all(http, proxies, u, 1.0)))
        found["until all drop a killed engine"] = drops, "s"
        found["until all use a new engine"] = sees, "s"
        found["admit a group"] = await _admissions(http, proxies), "ms"
        await asyncio.to_thread(_open_sessions, database_url)
        found[f"admit a group beside {SESSIONS:,} open sessions"] = await _admissions(http, proxies), "ms"
    return found


async def _admissions(http: aiohttp.ClientSession, proxies: list[str]) -> list[float]:
    """Milliseconds of the start of each group, which takes a place and the next of the run's tasks."""
    took = []
    for n in range(ADMISSIONS):
        started = time.monotonic()
        async with http.post(f"{proxies[n % len(proxies)]}/groups", json={}, headers=proxied.RUN) as answer:
            assert answer.status == 201, await answer.text()
        took.append(1e3 * (time.monotonic() - started))
    return took


def _open_sessions(database_url: str) -> None:
    """Open sessions in the store, as admission does, many in one transaction."""
    database = Database(database_url)
    with database.read() as conn:
        run = runs.by_name(conn, "bench")
    limits = Limits.of(RunConfig.model_validate(run.config))
    for _ in range(SESSIONS // AT_ONCE):
        keys = [new_id() for _ in range(AT_ONCE)]
        database.transact(group_starts.start_group, run.id, limits, keys)
    database.close()


async def _join(http: aiohttp.ClientSession, proxy: str, url: str) -> None:
    async with http.post(f"{proxy}/api/engines/join", json={"url": url, "lease_s": 3600}, headers=ADMIN) as answer:
        assert answer.status == 200, await answer.text()


async def _until(condition: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until the condition holds; at most a minute."""
    started = time.monotonic()
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - the proxies are other processes
            await asyncio.sleep(0.02)
    return time.monotonic() - started


async def _all(http: aiohttp.ClientSession, proxies: list[str], url: str, up: float) -> bool:
    """Whether all proxies say in their metrics that an engine is up, or is not."""
    for proxy in proxies:
        async with http.get(f"{proxy}/metrics", headers=ADMIN) as answer:
            lines = [line for line in (await answer.text()).splitlines() if line.startswith("agentrl_engine_usable{")]
        if not any(f'"{url}"' in line and float(line.rpartition(" ")[2]) == up for line in lines):
            return False
    return True


def _transactions(database_url: str) -> int:
    with psycopg.connect(database_url.replace("postgresql+psycopg", "postgresql")) as conn:
        row = conn.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").fetchone()
        assert row is not None
        return int(row[0])
