"""The bound on staleness, over a whole run: real proxy, admission, rollouts and leases; engine and update stand-ins.

Episodes are of very uneven length, and one of them sits out several updates in the middle. Afterwards plain SQL over
the finished run says how old every trained token was.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from openai import AsyncOpenAI
from run_records import create_run
from sqlalchemy import JSON, Connection, text

from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.schemas import Batch, TrainedBatch, TrainedTrajectory
from agentrl.engine.server_process import free_port
from agentrl.proxy.app import Settings, create_app
from agentrl.rendering import load_renderer
from agentrl.rollout.held_out import settings_of
from agentrl.rollout.worker import work
from agentrl.store import Database, runs
from agentrl.store.audit import run_audit
from agentrl.store.training import steps, trainer_epochs, version_states
from agentrl.testing import FakeEngine

GROUPS_PER_STEP = 2


class Uneven:
    """Makes `data["turns"]` calls; the first task it gets sits out `sits_out` updates after its first call."""

    def __init__(self, proxy_url: str, sits_out: int) -> None:
        self.run_url = f"{proxy_url}/api/run"
        self.sits_out = sits_out
        self.slow_task: int | None = None

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        if self.slow_task is None:
            self.slow_task = data["n"]
        messages: list[Any] = []
        for turn in range(max(2, data["turns"]) if data["n"] == self.slow_task else data["turns"]):
            messages.append({"role": "user", "content": f"turn {turn}"})
            reply = await client.chat.completions.create(model="default", messages=messages, max_tokens=8)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            if turn == 0 and data["n"] == self.slow_task:
                await self._sit_out(extra["http_client"])
        return data["n"] % 3 / 2

    async def _sit_out(self, http: httpx.AsyncClient) -> None:
        while True:
            run = (await http.get(self.run_url, headers={"Authorization": "Bearer run-key"})).json()
            if run["published_step"] >= self.sits_out:
                return
            await asyncio.sleep(0.02)


def tasks() -> list[dict[str, Any]]:
    """Most episodes are short, every seventh is long."""
    return [{"n": n, "turns": 12 if n % 7 == 0 else 1 + n % 3} for n in range(64)]


@dataclass
class Trainer:
    """The trainer without a model: leases, completes, publishes."""

    database: Database
    run_id: str
    config: RunConfig
    proxy_url: str
    weights: Path
    stop: threading.Event

    def train(self) -> None:
        with self.database.write() as conn:
            epoch = trainer_epochs.begin_epoch(conn, self.run_id)
        for step in range(1, self.config.steps + 1):
            batch = self.lease(epoch, step)
            with self.database.write() as conn:
                version = version_states.next_version(conn, self.run_id)
                steps.complete(
                    conn,
                    self.run_id,
                    epoch,
                    trained_batch(batch),
                    metrics={},
                    version=version,
                    path=str(self.weights),
                    checksum="-",
                )
            body, headers = {"version": version}, {"Authorization": "Bearer admin-key"}
            httpx.post(f"{self.proxy_url}/admin/publish", json=body, headers=headers, timeout=120).raise_for_status()
        with self.database.write() as conn:
            runs.set_status(conn, self.run_id, "finished")

    def lease(self, epoch: int, step: int) -> Batch:
        while not self.stop.wait(0.01):
            with self.database.write() as conn:
                step_id = steps.lease(
                    conn,
                    self.run_id,
                    epoch,
                    step=step,
                    n_groups=GROUPS_PER_STEP,
                    max_staleness=self.config.trainer.max_staleness,
                    discount=1.0,
                )
                if step_id is not None:
                    return steps.batch(conn, step_id)
        raise AssertionError("the rollouts ended before the run did")


def trained_batch(batch: Batch) -> TrainedBatch:
    """As the trainer reports it."""
    trained = []
    for t in batch.trajectories:
        if t.loss_mask.any():
            ages = np.array([batch.ages[v] for v in t.versions[t.loss_mask].tolist()])
            trained.append(
                TrainedTrajectory(
                    trajectory_id=t.trajectory_id,
                    advantage=0.0,
                    staleness_max=int(ages.max()),
                    staleness_mean=float(ages.mean()),
                    tokens_trained=len(ages),
                )
            )
    return TrainedBatch(
        step_id=batch.step_id,
        digest=batch.digest(),
        estimator="grpo",
        wasted_tokens=batch.wasted_tokens,
        trained=trained,
    )


@contextmanager
def serving(settings: Settings, port: int) -> Iterator[None]:
    """The real proxy, until the block ends."""
    app = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def play(config: RunConfig, url: str, stop: threading.Event) -> None:
    """The rollout worker, to the end of the run."""
    try:
        settings, console = settings_of(config), Console(file=io.StringIO())
        await work(config, settings, base_url=url, api_key="run-key", owner="worker", console=console)
    finally:
        stop.set()


@pytest.mark.parametrize(
    ("database_kind", "max_staleness"),
    [
        ("sqlite", 0),
        pytest.param("sqlite", 1, marks=pytest.mark.long),
        pytest.param("sqlite", 4, marks=pytest.mark.long),
        ("postgresql", 1),
    ],
)
async def test_no_trained_token_is_older_than_the_bound(
    database_url: str, tiny_model: Path, tmp_path: Path, max_staleness: int
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    sits_out = max_staleness + 2 if max_staleness else 0  # with 0 nobody can train past a group that sits
    config = RunConfig.model_validate(
        {
            "name": "test",
            "model": str(tiny_model),
            "agent": f"{__name__}:Uneven",
            "tasks": f"{__name__}:tasks",
            "agent_args": {"proxy_url": url, "sits_out": sits_out},
            "steps": max_staleness + 6,
            "rollout": {"group_size": 2, "max_concurrent_groups": 16},
            "trainer": {"groups_per_step": GROUPS_PER_STEP, "max_staleness": max_staleness},
        }
    )
    database = Database(database_url)
    with database.write() as conn:
        run_id = create_run(
            conn, config=config.model_dump(mode="json"), task_data=tasks(), base_model=tiny_model, steps=config.steps
        )
    answer = load_renderer(tiny_model).stop_token_ids[:1]
    stop = threading.Event()
    trainer = Trainer(database, run_id, config, url, tmp_path, stop)
    with FakeEngine(lambda ids, params: [70 + len(ids) % 9, 80, *answer], token_delay_s=0.001) as engine:
        settings = Settings(
            database_url=database_url, run_name="test", engine_urls=[engine.url], admin_key="admin-key", replica="r"
        )
        with serving(settings, port):
            async with asyncio.TaskGroup() as both:
                both.create_task(asyncio.to_thread(trainer.train))
                both.create_task(play(config, url, stop))
    with database.read() as conn:
        check_ages(conn, run_id, config)
        check_counters(conn, run_id)
        assert list(run_audit.scan(conn, run_id)) == []
    database.close()


TRAINED = text("""
    SELECT s.version_before, st.trajectory_id, st.tokens_trained, st.staleness_max, ti.owned AND i.trainable AS counts,
           d.spans
    FROM steps s
    JOIN step_trajectories st ON st.step_id = s.id
    JOIN trajectory_interactions ti ON ti.trajectory_id = st.trajectory_id
    JOIN interactions i ON i.id = ti.interaction_id AND i.status = 'complete'
    JOIN interaction_data d ON d.interaction_id = i.id
    WHERE s.run_id = :run AND s.state = 'published'
""").columns(spans=JSON)

DEPTHS = text("""
    WITH RECURSIVE depth(version, n) AS (
        SELECT version, 0 FROM weight_versions WHERE run_id = :run AND parent_version IS NULL
        UNION ALL
        SELECT w.version, depth.n + 1 FROM weight_versions w JOIN depth ON w.parent_version = depth.version
        WHERE w.run_id = :run
    )
    SELECT version, n FROM depth
""")


def check_ages(conn: Connection, run_id: str, config: RunConfig) -> None:
    """Of every trajectory exactly the tokens within the bound were trained, and some were as old as that."""
    depth = {row.version: row.n for row in conn.execute(DEPTHS, {"run": run_id})}
    ages: dict[str, Counter[int]] = {}
    recorded: dict[str, tuple[int, int]] = {}
    for row in conn.execute(TRAINED, {"run": run_id}):
        counter = ages.setdefault(row.trajectory_id, Counter())
        recorded[row.trajectory_id] = (row.tokens_trained, row.staleness_max)
        for version, start, end in row.spans if row.counts else []:
            counter[depth[row.version_before] - depth[version]] += end - start
    bound = config.trainer.max_staleness
    assert len(ages) >= config.steps * GROUPS_PER_STEP
    for trajectory, by_age in ages.items():
        young = {age: n for age, n in by_age.items() if age <= bound}
        assert recorded[trajectory] == (sum(young.values()), max(young))
    trained_ages = {age for by_age in ages.values() for age in by_age if age <= bound}
    sampled_ages = {age for by_age in ages.values() for age in by_age}
    if bound:
        assert max(trained_ages) > 0, "admission let nobody run ahead of the trainer"
        assert max(sampled_ages) > bound, "the episode that sat out has no token that is too old"
    else:
        assert sampled_ages == {0}


def check_counters(conn: Connection, run_id: str) -> None:
    """The run's counters are what its groups say."""
    states = Counter(
        conn.execute(text("SELECT state FROM groups WHERE run_id = :run AND NOT is_eval"), {"run": run_id}).scalars()
    )
    run = conn.execute(text("SELECT * FROM runs WHERE id = :run"), {"run": run_id}).one()
    assert (run.admitted, run.running) == (states.total(), states["running"])
    assert run.returned == states["rejected"] + states["stale"]
    assert states["trained"] == run.target_steps * GROUPS_PER_STEP
    assert run.published_step == run.target_steps
