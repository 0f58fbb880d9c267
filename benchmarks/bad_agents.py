"""Thousands of bad agents beside good ones in one worker: what do the good ones feel?

    python benchmarks/bad_agents.py --out benchmarks/results/bad_agents.json

A proxy and a rollout worker with `rollout.processes` run as processes, on SQLite, in front of a fake engine. Each group
is a good and a bad episode (misbehaving.py). For each kind of bad agent, rounds with bad agents (`bad`) alternate with
rounds in which well-behaved ones wait as long instead (`quiet`), so that as many episodes run at a time in both. An
episode's time-out is 10 s; what ignores it is killed after 20 s.

- `block`: time.sleep in async code, 5 to 20 s. `sleep`: as long, and ignores its cancellation. `spin`: a busy loop.
- `crash`: os._exit or SIGSEGV, with a process left behind, or an exception. `leak`: keeps 16 MiB. Both after 2 to 6 s.

Durations are those of the good episodes, from the start of their groups to their recorded ends, without the first
groups that start at the same moment. Exit status 1: good agents' p95 with bad ones is more than twice that without; a
good episode fails; a heartbeat fails, or comes after more than half of the time-out; a tool stays held; a process is
left; a session is lost; or the store is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from harness import Report
from misbehaving import LEDGER, ROLES
from sqlalchemy import select
from tokenizers import Tokenizer
from tool_ledger import ToolLedger

from agentrl.console import Console
from agentrl.engine.server_process import free_port
from agentrl.environment import ADMIN_KEY, PROXY_URL, RUN_KEY
from agentrl.models import resolve_model
from agentrl.store import Database
from agentrl.store.tables import groups, heartbeats, sessions
from agentrl.testing import FakeEngine

KINDS = ("block", "sleep", "crash", "leak", "spin")
LONG = ("block", "sleep", "spin")
END = 2  # the end of a turn, in SmolLM2's vocabulary
CALL = "step()"
HEARTBEAT_TIMEOUT_S = 12.0  # a heartbeat is sent every 2 s
FAILED = "a heartbeat failed"  # what a worker logs
STUCK_S = 120.0
MEMORY_MB = 96  # that of a process after two leaks
MARK = "BAD_AGENTS_FOLDER"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a round."""

    pairs: int
    at_once: int
    processes: int
    long_s: tuple[float, float]  # how long agents that block, sleep or spin do so
    short_s: tuple[float, float]  # after how long others crash or leak
    timeout_s: float


@dataclass
class Seen:
    """What a round showed."""

    good_s: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)  # "ROLE STATUS"
    beats_s: list[float] = field(default_factory=list)  # between two heartbeats
    worker_mb: list[float] = field(default_factory=list)
    agents_mb: list[float] = field(default_factory=list)  # all processes of agents, shared memory counted once
    tools: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # of bad episodes
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0


def main() -> None:
    """Run all rounds; exits with status 1 when bad agents harm others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="of bad agents, of all kinds together (2000)")
    parser.add_argument("--rounds", type=int, default=2, help="with and without the bad agents of a kind (2)")
    parser.add_argument("--at-once", type=int, default=80, help="pairs of a good and a bad episode at once (80)")
    parser.add_argument("--processes", type=int, help="rollout.processes (default: one for each episode at once)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="kinds of bad agents (all)")
    parser.add_argument("--quick", action="store_true", help="60 episodes, one round, and no bound on durations")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.rounds, options.at_once = 60, 1, 4
    plan = Plan(
        pairs=-(-options.episodes // (len(KINDS) * options.rounds)),
        at_once=options.at_once,
        processes=options.processes or 2 * options.at_once,
        long_s=(2.0, 5.0) if options.quick else (5.0, 20.0),
        short_s=(0.0, 1.0) if options.quick else (2.0, 6.0),
        timeout_s=4.0 if options.quick else 10.0,
    )
    console, seen = Console(highlight=False, soft_wrap=True), dict[tuple[str, str], list[Seen]]()
    for kind in options.kinds:
        for _ in range(options.rounds):
            for variant in ("quiet", "bad"):
                one = round_of(kind, variant, plan)
                seen.setdefault((kind, variant), []).append(one)
                console.print(f"{kind}/{variant}: {told(one)}", markup=False)
    report = Report("bad_agents")
    report.notes |= {"pairs_at_once": plan.at_once, "processes": plan.processes, "timeout_s": plan.timeout_s}
    wrong = [line for rounds in seen.values() for one in rounds for line in one.wrong]
    wrong += figures(report, options.kinds, seen, bounded=not options.quick)
    report.notes["wrong"] = wrong
    report.notes["errors of bad agents"] = {
        kind: dict(sum((one.errors for one in seen[kind, "bad"]), Counter())) for kind in options.kinds
    }
    report.show()
    if options.out:
        report.write(options.out)
    for line in wrong:
        console.print(line, markup=False)
    raise SystemExit(1 if wrong else 0)


def figures(report: Report, kinds: list[str], seen: dict[tuple[str, str], list[Seen]], *, bounded: bool) -> list[str]:
    """Add the figures; returns what is out of bounds."""
    wrong = []
    for kind in kinds:
        for quantile in (50, 95, 99):
            for variant in ("quiet", "bad"):
                samples = [float(np.percentile(one.good_s, quantile)) for one in seen[kind, variant]]
                base = None if variant == "quiet" else f"{kind}/p{quantile}/quiet"
                report.add(f"{kind}/p{quantile}/{variant}", samples, "s", base)
        ratio = report[f"{kind}/p95/bad"].ratio
        if bounded and ratio is not None and ratio > 2:
            wrong.append(f"{kind}: the p95 of the good agents is {ratio:.2f} times that without bad ones")
        bad = seen[kind, "bad"]
        report.add(f"{kind}/heartbeat", [max(one.beats_s) for one in bad], "s", statistic=max)
        report.add(f"{kind}/worker", [max(one.worker_mb) for one in bad], "MiB", statistic=max)
        report.add(f"{kind}/worker/growth", [one.worker_mb[-1] - one.worker_mb[0] for one in bad], "MiB", statistic=max)
        report.add(f"{kind}/agents", [max(one.agents_mb) for one in bad], "MiB", statistic=max)
    every = [one for rounds in seen.values() for one in rounds]
    for name in ("create", "release", "death"):
        report.add(f"tools/{name}", [float(sum(one.tools[name] for one in every))], "tools")
    for role in ("good", "bad"):
        of_bad = [one for (_, variant), rounds in seen.items() if variant == "bad" for one in rounds]
        for status in ("completed", "failed"):
            number = sum(one.ended[f"{role} {status}"] for one in of_bad)
            report.add(f"beside_bad/{role}/{status}", [float(number)], "episodes")
    return wrong


def told(one: Seen) -> str:
    """A round in a line."""
    p50, p95 = np.percentile(one.good_s, [50, 95]) if one.good_s else (0, 0)
    return (
        f"{one.took_s:.0f} s; good p50 {p50:.2f} s, p95 {p95:.2f} s; {dict(one.ended)}; tools {dict(one.tools)}; "
        f"beats {max(one.beats_s):.1f} s; worker {max(one.worker_mb):.0f} MiB; agents {max(one.agents_mb):.0f} MiB; "
        f"{dict(one.errors)}; "
        f"{'; '.join(one.wrong) or 'nothing wrong'}"
    )


def round_of(kind: str, variant: str, plan: Plan) -> Seen:
    """Run a worker until as many pairs have ended as the plan says."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bad-") as name, ExitStack() as stack:
        folder = Path(name).resolve()
        (folder / "roles").mkdir()
        played = kind if variant == "bad" else "wait"
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks(kind, played, plan)))
        (folder / "config.yaml").write_text(yaml.safe_dump(config(plan)))
        ledger = stack.enter_context(ToolLedger(folder / "ledger"))
        engine = stack.enter_context(FakeEngine(answering()))
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), MARK: str(folder), "OMP_NUM_THREADS": "1"}
        env |= {RUN_KEY: "run-key", ADMIN_KEY: "admin-key", LEDGER: str(ledger.socket), ROLES: str(folder / "roles")}
        agentrl = [sys.executable, "-m", "agentrl"]
        create = [*agentrl, "run", "create", "config.yaml"]
        subprocess.run(create, cwd=folder, env=env, check=True, capture_output=True)
        port = str(free_port())
        proxy = [*agentrl, "proxy", "--run", "bad", "--engine", engine.url, "--port", port, "--log-level", "warning"]
        stack.enter_context(process(proxy, folder, env))
        env |= {PROXY_URL: f"http://127.0.0.1:{port}"}
        database = Database(f"sqlite:///{folder}/runs/bad/agentrl.db")
        stack.callback(database.close)
        with process([*agentrl, "rollout", "--config", "config.yaml", "--owner", "worker"], folder, env) as worker:
            one = followed(database, worker, plan.pairs, folder)
            until(lambda: not ledger.held)
            one.wrong += [f"{ledger.held} tools are held after all episodes"] * bool(ledger.held)
            strays = [child for child in marked(folder) if child.name() == "sleep"]
            one.wrong += [f"{len(strays)} processes of agents that crashed are left"] * bool(strays)
        until(lambda: len(marked(folder)) <= 1)
        left = [child.cmdline() for child in marked(folder) if "proxy" not in child.cmdline()]
        one.wrong += [f"{len(left)} processes are left: {left[:3]}"] * bool(left)
        judge(one, database, ledger, folder, plan)
        checked = subprocess.run(
            [*agentrl, "store", "check", "--run", "bad"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if checked.returncode:
            one.wrong.append(f"the store is wrong: {checked.stderr[:500]}")
    one.wrong = [f"{kind}/{variant}: {line}" for line in one.wrong]
    return one


def tasks(kind: str, played: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """What the bad agent of each pair does."""
    shortest, longest = plan.long_s if kind in LONG else plan.short_s
    for number in range(plan.pairs):
        share = (number * 0.618034) % 1.0  # evenly spread, in no order
        seconds = shortest + (longest - shortest) * share ** (4 if kind in LONG else 1)
        yield {"kind": played, "number": number, "seconds": seconds}


def config(plan: Plan) -> dict[str, Any]:
    """A run that admits so many pairs, whose group trains if one of them completes."""
    return {
        "name": "bad",
        "model": "smollm2",
        "agent": "misbehaving:Agent",
        "tasks": "tasks.jsonl",
        "steps": 2,
        "rollout": {
            "group_size": 2,
            "min_group_size": 1,
            "max_concurrent_groups": plan.at_once,
            "processes": plan.processes,
            "process_memory_mb": MEMORY_MB,
            "timeout_s": plan.timeout_s,
            "max_failures_in_a_row": None,
        },
        "trainer": {"groups_per_step": plan.pairs, "max_staleness": 0},
        "proxy": {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
    }


def answering() -> Any:
    """The engine's answers: two calls of the tool, then a text."""
    tokenizer = Tokenizer.from_file(str(resolve_model("smollm2", weights=False) / "tokenizer.json"))
    call, text = ([*tokenizer.encode(said, add_special_tokens=False).ids, END] for said in (CALL, "done"))

    def answer(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        return text if "counted 2" in tokenizer.decode(input_ids) else call

    return answer


@contextmanager
def process(argv: list[str], folder: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of agentrl, and end it."""
    with (folder / f"{argv[3]}.log").open("wb") as log:  # python -m agentrl NAME
        child = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(60)


def followed(database: Database, worker: subprocess.Popen[bytes], pairs: int, folder: Path) -> Seen:
    """Watch heartbeats and memory until all episodes have ended."""
    one, started = Seen(), time.monotonic()
    changed, ended, last_beat, measured = started, -1, 0.0, 0.0
    counted = select(sessions.c.id).where(sessions.c.ended_at.is_not(None))
    beats = select(heartbeats.c.last_seen_at).where(heartbeats.c.kind == "worker")
    root = psutil.Process(worker.pid)
    while ended < 2 * pairs:
        with database.read() as conn:
            count = len(conn.execute(counted).all())
            beat = max(conn.execute(beats).scalars(), default=0.0)
        if count != ended:
            changed, ended = time.monotonic(), count
        if beat != last_beat:
            one.beats_s += [beat - last_beat] * bool(last_beat)
            last_beat = beat
        if time.monotonic() - measured > 2.0 and ended > 0:
            measured = time.monotonic()
            one.worker_mb.append(root.memory_info().rss / 2**20)
            one.agents_mb.append(sum(pss_mb(child.pid) for child in root.children(recursive=True)))
        if worker.poll() is not None or time.monotonic() - changed > STUCK_S:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
            raise SystemExit(f"{ended} of {2 * pairs} episodes have ended, and no more do\n{logs}")
        time.sleep(0.25)
    one.beats_s.append(time.time() - last_beat)
    one.took_s = time.monotonic() - started
    return one


def pss_mb(pid: int) -> float:
    """The memory of a process, with its share of what it shares with others; 0 for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return float(text.partition("\nPss:")[2].split()[0]) / 1024


def judge(one: Seen, database: Database, ledger: ToolLedger, folder: Path, plan: Plan) -> None:
    """Add the good episodes' durations, and what is wrong."""
    lines = (folder / "roles" / "sessions.jsonl").read_text().splitlines()
    roles = {said["session"]: said["role"] for said in map(json.loads, lines)}
    with database.read() as conn:
        rows = conn.execute(
            select(sessions, groups.c.created_at.label("group_created_at"))
            .join(groups, groups.c.id == sessions.c.group_id)
            .order_by(groups.c.created_at)
        ).all()
    for number, row in enumerate(rows):
        role = roles.get(row.id, "unstarted")
        one.ended[f"{role} {row.status}"] += 1
        if role == "good" and row.status != "completed":
            one.wrong.append(f"a good episode {row.status}: {row.error}")
        if role != "good" and row.error:
            one.errors[re.sub(r"\d+\.?\d*", "N", row.error)[:80]] += 1
        if role == "good" and number >= 2 * min(plan.at_once, plan.pairs // 2):
            one.good_s.append(row.ended_at - row.group_created_at)
    if len(rows) != 2 * plan.pairs or one.ended["unstarted failed"]:
        one.wrong.append(f"{len(rows)} sessions instead of {2 * plan.pairs}: {dict(one.ended)}")
    if any(row.status not in ("completed", "failed") for row in rows):
        one.wrong.append(f"a session was lost: {dict(one.ended)}")
    for name in ("create", "execute", "release", "death"):
        one.tools[name] = ledger.of(name)
    unended = one.tools["create"] - one.tools["release"] - one.tools["death"]
    if unended or ledger.of("execute", "good") != 2 * plan.pairs:
        one.wrong.append(f"tools: {dict(ledger.events)}")
    late = (folder / "rollout.log").read_text(errors="replace").count(FAILED)
    if late or max(one.beats_s) > HEARTBEAT_TIMEOUT_S / 2:
        one.wrong.append(f"{late} heartbeats failed; {max(one.beats_s):.1f} s between two, which come every 2 s")


def marked(folder: Path) -> list[psutil.Process]:
    """The living processes of a round."""
    found = []
    for child in psutil.process_iter():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and child.environ().get(MARK) == str(folder):
                found.append(child)
        except psutil.Error:
            continue
    return found


def until(condition: Any, patience_s: float = 20.0) -> None:
    """Wait until a condition holds, or the patience ends."""
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
