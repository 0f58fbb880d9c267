"""Episodes of each environment through real processes: is the reward that is recorded the environment's own?

    python benchmarks/environments.py puzzles --episodes 100 --out benchmarks/results/environments.json

A rollout worker and a proxy run as processes, in front of a fake engine whose answers are random moves. Then each
episode is played again without agentrl, from its task and the recorded answers, and its rewards are compared with the
recorded ones. Exit status 1: an episode failed, or a reward differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from adapted.subject import Subject
from harness import Report
from sqlalchemy import select
from tokenizers import Tokenizer

from agentrl.console import Console
from agentrl.engine.server_process import free_port
from agentrl.environment import ADMIN_KEY, PROXY_URL, RUN_KEY
from agentrl.models import resolve_model
from agentrl.store import Database
from agentrl.store.tables import groups, sessions, tasks
from agentrl.testing import FakeEngine

GROUP_SIZE = 4
STUCK_S = 300.0
END = 2  # the end of a turn, in SmolLM2's vocabulary
NAMES = ("puzzles", "games", "walks", "hub", "vault", "samples", "trials")


def main() -> None:
    """Run the environments that are named; exits with status 1 when a reward differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--episodes", type=int, default=100, help="of each environment (default 100)")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    console, report, wrong = Console(highlight=False, soft_wrap=True), Report("environments"), 0
    for name in options.names or NAMES:
        subject: Subject = importlib.import_module(f"adapted.{name}").subject()
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="agentrl-environments-") as folder, ExitStack() as stack:
            for file, text in subject.files.items():
                (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / file).write_text(text)
            stack.enter_context(subject.service(Path(folder)))
            played = play(subject, options.episodes, Path(folder).resolve())
            took_s = time.monotonic() - started
            differ = compared(subject, played, console)
        rewarded = [reward for one in played for reward in one["recorded"] if reward is not None]
        report.add(f"{name}/equal", [float(len(played) - differ)], "episodes")
        report.add(f"{name}/episodes", [len(played) / took_s], "1/s")
        range_of = f"from {min(rewarded):g} to {max(rewarded):g}" if rewarded else ""
        console.print(
            f"{name}: {len(played)} episodes, {len(rewarded)} rewards {range_of} ({len(set(rewarded))} values); "
            f"{differ} episodes differ",
            markup=False,
        )
        wrong += differ
        if options.out:
            report.write(options.out)
    if wrong:
        raise SystemExit(1)


def compared(subject: Subject, played: list[dict[str, Any]], console: Console) -> int:
    """How many episodes have other rewards than the environment gives them."""
    differ = 0
    for episode in played:
        if episode["status"] != "completed":  # the environment may have no reward for it
            differ += 1
            console.print(f"{episode['status']}: {episode['error']}: {str(episode['task'])[:300]}", markup=False)
        elif (expected := subject.rewards(episode)) != episode["recorded"]:
            differ += 1
            found = f"{expected} expected, {episode['recorded']} recorded"
            console.print(f"{found}: {str(episode['task'])[:300]}", markup=False)
    return differ


def play(subject: Subject, episodes: int, folder: Path) -> list[dict[str, Any]]:
    """Let a worker run episodes; returns what is recorded of each."""
    n_groups = -(-episodes // GROUP_SIZE)
    run = {
        "name": "episodes",
        "model": "smollm2",
        "steps": 2,
        "rollout": {"group_size": GROUP_SIZE, "max_concurrent_groups": 2},
        "trainer": {"groups_per_step": n_groups, "max_staleness": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(run | subject.config(folder)))
    env = os.environ | {"PYTHONPATH": str(folder), RUN_KEY: "run-key", ADMIN_KEY: "admin-key"}
    agentrl = [sys.executable, "-m", "agentrl"]
    subprocess.run([*agentrl, "run", "create", "config.yaml"], cwd=folder, env=env, check=True, stdout=subprocess.PIPE)
    with FakeEngine(answering(subject)) as engine:
        url = f"http://127.0.0.1:{free_port()}"
        port = url.rpartition(":")[2]
        served = ["proxy", "--run", "episodes", "--engine", engine.url, "--port", port, "--log-level", "warning"]
        worker = ["rollout", "--config", "config.yaml", "--owner", "worker"]
        with (
            process([*agentrl, *served], folder, env),
            process([*agentrl, *worker], folder, env | {PROXY_URL: url}),
        ):
            database = Database(f"sqlite:///{folder}/runs/episodes/agentrl.db")
            wait_for_end(database, n_groups * GROUP_SIZE, folder)
            found = recorded(database, url, folder)
            database.close()
    return found


def answering(subject: Subject) -> Callable[[list[int], dict[str, Any]], list[int]]:
    """The engine's answers: the subject's text in tokens."""
    tokenizer = Tokenizer.from_file(str(resolve_model("smollm2", weights=False) / "tokenizer.json"))
    rng = random.Random(0)

    def answer(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        text = subject.says(tokenizer.decode(input_ids, skip_special_tokens=False), rng)
        return [*tokenizer.encode(text, add_special_tokens=False).ids, END]

    return answer


@contextmanager
def process(argv: list[str], folder: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a command of agentrl, and end it."""
    with (folder / f"{argv[3]}.log").open("wb") as log:
        child = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        yield
    finally:
        child.terminate()
        child.wait(60)


def wait_for_end(database: Database, episodes: int, folder: Path) -> None:
    """Wait until so many sessions of episodes have ended."""
    changed, last = time.monotonic(), -1
    ended = select(sessions.c.id).where(sessions.c.parent_session_id.is_(None), sessions.c.ended_at.is_not(None))
    while last < episodes:
        with database.read() as conn:
            count = len(conn.execute(ended).all())
        if count != last:
            changed, last = time.monotonic(), count
        if time.monotonic() - changed > STUCK_S:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
            raise SystemExit(f"{count} of {episodes} episodes have ended, and no more do\n{logs}")
        time.sleep(0.5)


def recorded(database: Database, url: str, folder: Path) -> list[dict[str, Any]]:
    """What the proxy knows of each episode."""
    with database.read() as conn:
        rows = conn.execute(
            select(sessions, tasks.c.data.label("task"))
            .join(groups, groups.c.id == sessions.c.group_id)
            .join(tasks, tasks.c.id == groups.c.task_id)
            .order_by(sessions.c.seq)
        ).all()
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer run-key"}, timeout=60) as http:
        found = {row.id: of_session(http, row) for row in rows}
    for row in rows:
        if row.parent_session_id is not None:
            found[row.parent_session_id]["children"].append(found[row.id])
    episodes = [found[row.id] for row in rows if row.parent_session_id is None]
    for episode in episodes:
        episode["folder"] = folder
        episode["recorded"] = [episode["reward"], *(child["reward"] for child in episode["children"])]
    return episodes


def of_session(http: httpx.Client, row: Any) -> dict[str, Any]:
    """The answers and the rewards of a session."""
    calls = http.get(f"/sessions/{row.id}/trace").raise_for_status().json()["calls"]
    given = http.get(f"/sessions/{row.id}").raise_for_status().json()["rewards"]
    task = row.task if isinstance(row.task, dict) else json.loads(row.task)
    return {
        "id": row.id,
        "task": task,
        "answers": [call["answer"]["content"] or "" for call in calls],
        "tool_calls": [one["function"] for call in calls for one in call["answer"].get("tool_calls") or ()],
        "reward": sum(one["value"] for one in given) if given else None,
        "rewards": {one["name"]: one["value"] for one in given},
        "metadata": row.metadata or {},
        "status": row.status,
        "error": row.error,
        "children": [],
    }


if __name__ == "__main__":
    main()
