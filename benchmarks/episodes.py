"""Thousands of episodes at once: rollout workers and proxies as processes, on PostgreSQL, in front of fake engines.

    python benchmarks/episodes.py --out benchmarks/results/episodes.json

An episode makes CALLS calls and thinks THINK_S before each. The workers together fill `rollout.max_concurrent_groups`;
no trainer runs, and the run admits a fixed number of groups. It is gated on counts: as many episodes at once as the run
allows, all of them completed, no failure, and no worker with less than half or more than twice its share of the groups.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import yaml
from crash import new_database, postgres_version
from harness import Report
from proxied import cpu_s
from sqlalchemy import Engine, NullPool, create_engine, text

from agentrl.console import Console
from agentrl.engine.server_process import free_port
from agentrl.environment import ADMIN_KEY, DATABASE_URL, PROXY_URL, RUN_KEY
from agentrl.testing import FakeEngine

CALLS = 3
THINK_S = 20.0
GROUP_SIZE = 8
STUCK_S = 300.0
N_ENGINES = 4
AGENT = f"""
import asyncio
from openai import AsyncOpenAI

class Agent:
    async def run(self, data, **extra):
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        messages = []
        for turn in range({CALLS}):
            await asyncio.sleep({THINK_S})
            messages.append({{"role": "user", "content": f"{{data}} {{turn}}"}})
            reply = await client.chat.completions.create(model="default", messages=messages, max_tokens=8)
            messages.append({{"role": "assistant", "content": reply.choices[0].message.content}})
        return 1.0
"""
RUNNING = "SELECT count(*) FROM sessions WHERE status = 'open'"
ENDED = "SELECT status, count(*) AS n FROM sessions GROUP BY status"
SHARES = "SELECT split_part(owner, '/', 1) AS worker, count(*) AS n FROM groups GROUP BY worker ORDER BY worker"


def main() -> None:
    """Do the run; exits with status 1 when a count is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="episodes at once (default 2000)")
    parser.add_argument("--rounds", type=int, default=2, help="how often each place is used (default 2)")
    parser.add_argument("--workers", type=int, default=4, help="rollout workers (default 4)")
    parser.add_argument("--proxies", type=int, default=2, help="proxies (default 2)")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    places = options.episodes // GROUP_SIZE
    total = places * options.rounds
    console = Console(highlight=False, soft_wrap=True)
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-episodes-") as name,
        new_database("postgresql", Path(name)) as (
            url,
            _,
        ),
    ):
        folder = Path(name).resolve()
        (folder / "episode_agent.py").write_text(AGENT)
        (folder / "config.yaml").write_text(yaml.safe_dump(config(places, total)))
        env = os.environ | {"PYTHONPATH": str(folder), DATABASE_URL: url, RUN_KEY: "run-key", ADMIN_KEY: "admin-key"}
        subprocess.run(
            [sys.executable, "-m", "agentrl", "run", "create", "config.yaml"], cwd=folder, env=env, check=True
        )
        with ExitStack() as stack:
            engines = [stack.enter_context(FakeEngine()).url for _ in range(N_ENGINES)]
            ports = [free_port() for _ in range(options.proxies)]
            proxies = [stack.enter_context(process(folder, env, f"proxy-{p}", proxy_argv(p, engines))) for p in ports]
            workers = []
            for number in range(options.workers):
                own = env | {PROXY_URL: f"http://127.0.0.1:{ports[number % len(ports)]}"}
                argv = ["rollout", "--config", "config.yaml", "--owner", f"worker-{number}"]
                workers.append(stack.enter_context(process(folder, own, f"worker-{number}", argv)))
            report = follow(
                create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), poolclass=NullPool),
                proxies,
                workers,
                total,
                folder,
                console,
            )
    report.notes |= {"episodes_at_once": options.episodes, "workers": options.workers, "proxies": options.proxies}
    check(report, options.episodes, total, console)
    if options.out:
        report.write(options.out)


def config(places: int, total: int) -> dict[str, object]:
    """A run that admits `total` groups, `places` at once."""
    return {
        "name": "episodes",
        "model": "tiny",
        "agent": "episode_agent:Agent",
        "tasks": "agentrl.agents.reverse:train_tasks",
        "steps": 2,
        "rollout": {"group_size": GROUP_SIZE, "max_concurrent_groups": places},
        "trainer": {"groups_per_step": total, "max_staleness": 0},
    }


def proxy_argv(port: int, engines: list[str]) -> list[str]:
    """The arguments of a proxy."""
    argv = ["proxy", "--run", "episodes", "--port", str(port), "--log-level", "warning"]
    return argv + [word for engine in engines for word in ("--engine", engine)]


@contextmanager
def process(folder: Path, env: dict[str, str], name: str, argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of agentrl, and end it."""
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen([sys.executable, "-m", "agentrl", *argv], cwd=folder, env=env, stdout=log, stderr=log)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(60)


def follow(
    database: Engine,
    proxies: list[subprocess.Popen[bytes]],
    workers: list[subprocess.Popen[bytes]],
    total: int,
    folder: Path,
    console: Console,
) -> Report:
    """Watch the run until all its episodes have ended."""
    report = Report("episodes", notes={"postgresql": postgres_version(), "calls": CALLS, "think_s": THINK_S})
    started = changed = time.monotonic()
    seen: list[int] = []
    last: dict[str, int] = {}
    while True:
        with database.connect() as conn:
            seen.append(conn.execute(text(RUNNING)).scalar_one())
            ended = {row.status: row.n for row in conn.execute(text(ENDED)) if row.status not in ("open", "closing")}
            shares = {row.worker: row.n for row in conn.execute(text(SHARES))}
        if ended != last:
            last, changed = ended, time.monotonic()
            console.print(f"[{changed - started:4.0f} s] {seen[-1]} running, ended: {ended}", markup=False)
        if sum(ended.values()) >= total * GROUP_SIZE:
            break
        dead = [child.args for child in (*proxies, *workers) if child.poll() is not None]
        if dead or time.monotonic() - changed > STUCK_S:
            logs = "\n".join(path.read_text(errors="replace")[-500:] for path in folder.glob("*.log"))
            raise SystemExit(f"the run is stuck; ended processes: {dead}\n{logs}")
        time.sleep(1.0)
    episodes = sum(ended.values())
    report.add("episodes", [episodes / (time.monotonic() - started)], "1/s")
    report.add("running", [float(max(seen))], "episodes")
    report.add("running/median", [float(median(seen))], "episodes")
    for kind, children in (("proxies", proxies), ("workers", workers)):
        report.add(f"cpu/{kind}", [sum(cpu_s(child.pid) for child in children) / episodes * 1000], "ms an episode")
    report.notes |= {"ended": ended, "groups_by_worker": shares}
    return report


def check(report: Report, at_once: int, total: int, console: Console) -> None:
    """Print the counts. Exits with status 1 when one is not as it must be."""
    most = next(figure.value for figure in report.figures if figure.name == "running")
    shares: dict[str, int] = report.notes["groups_by_worker"]  # type: ignore[assignment]
    fair = total / int(str(report.notes["workers"]))
    console.print(
        f"{most:g} episodes at once; ended: {report.notes['ended']}; groups by worker: {shares}", markup=False
    )
    for figure in report.figures:
        console.print(f"{figure.name}: {figure.value:.1f} {figure.unit}", markup=False)
    ok = most == at_once and report.notes["ended"] == {"completed": total * GROUP_SIZE}
    if not ok or not all(fair / 2 <= groups <= fair * 2 for groups in shares.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
