"""Measures what prefix trees gain on a recorded workload: multi-turn sessions with branches, sampled through the proxy.

    python benchmarks/tree_gain.py --out benchmarks/results/tree_gain.json
    python benchmarks/tree_gain.py --groups 1 --turns 2 --rounds 1

Agents talk to a proxy in front of a fake engine. A session has a system prompt with tools, a task that its group
shares, and some turns of a call and the tool's result. At every second turn the agent samples two drafts and goes on
with one of them, so that the recorded session is a tree. The trainer then makes a step from the recorded trajectories,
with random weights in SmolLM2-135M's shape, on one core.

- `tokens/WAY`: tokens that a pass computes: `tree`, each distinct prefix once; `alone`, each trajectory by itself
  (through the same packing and attention).
- `time/WAY`: CPU seconds of a step (forward, backward and optimizer). `gain` is the ratio of times, `theory` that of
  tokens, `of_theory` the first over the second.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import harness
import numpy as np
import torch
from proxied import RUN, start_proxy, until_healthy
from training.models import save_random_model
from turns import WORDS, long_model, text_of

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.batching import line_up
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.engine.server_process import free_port
from agentrl.rendering import load_renderer
from agentrl.store import Database, runs
from agentrl.store.training import recorded_paths
from agentrl.testing import FakeEngine
from agentrl.trainer import packing
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample, make_units
from agentrl.trainer.update import update_policy

SESSIONS = 4
SYSTEM_WORDS, TASK_WORDS, RESULT_WORDS = 150, 60, 50
SAMPLED = 40
BUDGET = 4096
STATES = ("ready",)


def main() -> None:
    """Record, measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 3, "steps of each way"), groups=(int, 2, "groups"), turns=(int, 4, "turns")
    )
    report = harness.Report("tree_gain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trajectories = asyncio.run(record(folder, options.groups, options.turns))
        samples = [
            Sample(t, np.where(t.loss_mask, 1 - 2 * (i % 2), 0).astype(np.float32)) for i, t in enumerate(trajectories)
        ]
        tokens = {way: distinct_tokens(samples, shares) for way, shares in (("alone", False), ("tree", True))}
        report.compare("tokens", {way: [float(n)] for way, n in tokens.items()}, "tokens", "alone")
        torch.set_num_threads(1)
        with join_world("cpu", threads=1) as world:
            step = stepper(save_random_model(folder), samples, world)
            found = harness.interleave({"alone": lambda: step(False), "tree": lambda: step(True)}, options.rounds)
    report.compare("time", found, "s", "alone")
    theory = tokens["alone"] / tokens["tree"]
    gains = [alone / tree for alone, tree in zip(found["alone"], found["tree"], strict=True)]
    report.add("gain", gains, "×")
    report.add("theory", [theory], "×")
    report.add("of_theory", [gain / theory for gain in gains], "×")
    report.notes |= {
        "trajectories": len(samples),
        "groups": options.groups,
        "sessions": SESSIONS,
        "turns": options.turns,
    }
    harness.finish(report, options.out)


async def record(folder: Path, groups: int, turns: int) -> list[TrajectoryTokens]:
    """Let agents talk to a proxy; returns the trajectories that it recorded."""
    model = long_model(folder / "tokenizer", "chatml")
    renderer, rng = load_renderer(model), random.Random(0)
    port = free_port()

    def answer(_ids: object, _params: object) -> list[int]:
        return renderer.encode(" " + said(rng, SAMPLED))[: SAMPLED - 1] + renderer.stop_token_ids[:1]

    (folder / "run").mkdir()
    with FakeEngine(answer, context_length=65_536) as engine:
        url, proxy = f"http://127.0.0.1:{port}", start_proxy(folder / "run", [engine.url], port, model)
        try:
            async with aiohttp.ClientSession(headers=RUN) as http:
                await until_healthy(http, url, proxy)
                for group in range(groups):
                    system, task = said(random.Random(-1), SYSTEM_WORDS), said(random.Random(group), TASK_WORDS)
                    await asyncio.gather(*(play(http, url, str(group), system, task, turns) for _ in range(SESSIONS)))
        finally:
            proxy.terminate()
            proxy.wait(20)
    database = Database(f"sqlite:///{folder}/run/bench.db")
    with database.read() as conn:
        run_id = runs.by_name(conn, "bench").id
        ids = recorded_paths.trainable_ids(conn, run_id, STATES, min_version=None, max_version=None)
        found = recorded_paths.load_whole(conn, run_id, ids)
    database.close()
    return found


async def play(http: aiohttp.ClientSession, url: str, group: str, system: str, task: str, turns: int) -> None:
    """Play one session. At every second turn the agent samples two drafts and keeps the second."""
    started = {"task": {}, "group": group, "group_size": SESSIONS}
    async with http.post(f"{url}/sessions", json=started) as answer:
        assert answer.status == 201, await answer.text()
        session = await answer.json()
    rng = random.Random(session["session_id"])
    history = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for turn in range(turns):
        drafts = [await call(http, session, history) for _ in range(1 + turn % 2)]
        history += [{"role": "assistant", "content": drafts[-1]}, {"role": "user", "content": said(rng, RESULT_WORDS)}]
    path = f"{url}/sessions/{session['session_id']}"
    for what, body in (("reward", {"value": rng.random()}), ("end", {})):
        async with http.post(f"{path}/{what}", json=body) as answer:
            assert answer.status < 300, await answer.text()


async def call(http: aiohttp.ClientSession, session: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """The text of one answer."""
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    body = {"messages": messages, "max_tokens": SAMPLED}
    async with http.post(f"{session['base_url']}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return text_of(await answer.read(), stream=False)


def said(rng: random.Random, words: int) -> str:
    """Some words."""
    return " ".join(rng.choices(WORDS, k=words))


def distinct_tokens(samples: list[Sample], shares: bool) -> int:
    """The tokens of all units."""
    with sharing(shares):
        return sum(unit.size for unit in make_units(samples, BUDGET))


def sharing(shares: bool) -> Any:
    """Where not `shares`, no two sequences share a token."""
    return patch.object(packing, "build_tree", packing.build_tree if shares else line_up)


def stepper(model: Path, samples: list[Sample], world: World) -> Callable[[bool], float]:
    """A function that makes a step and returns its CPU seconds."""
    config = TrainerConfig(tokens_per_microbatch=BUDGET)
    policy = load_sharded(Policy, model, world.mesh)
    optimizer = make_optimizer(policy, config)

    def step(shares: bool) -> float:
        with sharing(shares):
            start = time.process_time()
            update_policy(policy, optimizer, samples, 0, {0: 0}, config, world)
            return time.process_time() - start

    return step


if __name__ == "__main__":
    main()
