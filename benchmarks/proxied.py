"""A real proxy on a database of its own, for benchmarks of calls."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import psutil

from agentrl.configs.run_config import RunConfig
from agentrl.store import Database, runs

RUN = {"Authorization": "Bearer run-key"}


def create_run(database: Database, model: Path, **sections: object) -> str:
    """Create the run `bench` with `model` as its policy and more of its configuration; returns its id."""
    config = RunConfig.model_validate({"name": "bench", "model": "tiny", "agent": "a:B", "tasks": "t"} | sections)
    with database.write() as conn:
        return runs.create(
            conn,
            name="bench",
            config=config.model_dump(mode="json"),
            task_data=[{}],
            base_model=str(model),
            key="run-key",
            seed=0,
            steps=1,
        )


def start_proxy(
    folder: Path,
    engine_urls: list[str],
    port: int,
    model: Path,
    program: tuple[str, ...] = ("-m", "agentrl"),
    more: Mapping[str, str] | None = None,
    sections: Mapping[str, object] | None = None,
) -> subprocess.Popen[bytes]:
    """`launch_proxy` on a database of its own, for a run with more `sections` of configuration."""
    database = Database(f"sqlite:///{folder}/bench.db")
    database.upgrade()
    create_run(database, model, **(sections or {}))
    database.close()
    return launch_proxy(folder, engine_urls, port, program, more)


def launch_proxy(
    folder: Path,
    engine_urls: list[str],
    port: int,
    program: tuple[str, ...] = ("-m", "agentrl"),
    more: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `agentrl proxy`, or a `program` with its arguments, on the folder's database, with `more` variables."""
    argv = ["proxy", "--run", "bench", "--port", str(port), "--log-level", "warning"]
    argv += [word for url in engine_urls for word in ("--engine", url)]
    env = os.environ | {"AGENTRL_DATABASE_URL": f"sqlite:///{folder}/bench.db", "AGENTRL_ADMIN_KEY": "admin-key"}
    env |= more or {}
    return subprocess.Popen([sys.executable, *program, *argv], env=env, stdout=subprocess.DEVNULL)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far, user and system."""
    root = psutil.Process(pid)
    return sum(_own_cpu_s(process) for process in (root, *root.children(recursive=True)))


def _own_cpu_s(process: psutil.Process) -> float:
    if sys.platform == "linux":  # the process's CPU clock counts nanoseconds where /proc counts hundredths of a second
        return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return times.user + times.system


async def until_healthy(http: aiohttp.ClientSession, url: str, proxy: subprocess.Popen[bytes]) -> None:
    """Wait for the proxy's first answer."""
    while proxy.poll() is None:
        try:
            async with http.get(f"{url}/health"):
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"the proxy ended with status {proxy.returncode}")
