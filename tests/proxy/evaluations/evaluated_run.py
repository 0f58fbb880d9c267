"""A run with held-out tasks, whose trainer only does to the store what a real one does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
from run_records import create_run

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.engine.server_process import free_port
from agentrl.store import Database, evaluation_episodes, runs
from agentrl.store.training import steps, trainer_epochs, version_states
from agentrl.testing import FakeEngine

STEPS = 4
AGENT = """
import asyncio, os

class Agent:
    async def run(self, data, **extra):
        '''Two calls; worth what the answer makes of it. It writes down what it plays, and may hang.'''
        if extra["is_eval"]:
            with open("played.txt", "a") as file:
                file.write(f"{data['n']}\\n")
            if os.path.exists("hang") and len(open("played.txt").readlines()) > 5:
                open("hangs", "w").close()
                await asyncio.sleep(3600)
        messages = [{"role": "user", "content": f"task {data['n']}"}]
        for _ in range(2):
            answer = await extra["http_client"].post(
                extra["base_url"] + "/chat/completions", json={"model": "default", "messages": messages},
                headers={"Authorization": "Bearer " + extra["api_key"]},
            )
            answer.raise_for_status()
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        return sum(map(ord, messages[-2]["content"] or "")) % 7 / 6

def tasks():
    return [{"n": n} for n in range(4)]

def heldout():
    return [{"n": n} for n in range(100, 103)]
"""
EVALUATION = {"tasks": "player:heldout", "every": 2, "samples": 2, "settings": {"cool": {"temperature": 0.5}}}


def config(**evaluation: Any) -> RunConfig:
    return parse_config(
        {
            "name": "test",
            "model": "tiny",
            "agent": "player:Agent",
            "tasks": "player:tasks",
            "steps": STEPS,
            "rollout": {"group_size": 2, "max_concurrent_groups": 1},
            "trainer": {"groups_per_step": 2, "max_staleness": 0},
            "evaluation": evaluation,
        }
    )


class Run:
    """A run of its own: database, engine, proxy, and a trainer that only does to the store what a real one does."""

    def __init__(self, url: str, config: RunConfig, model: Path, engine: FakeEngine, folder: Path) -> None:
        self.database, self.config, self.engine, self.folder = Database(url), config, engine, folder
        self.url = f"http://127.0.0.1:{free_port()}"
        with self.database.write() as conn:
            self.id = create_run(
                conn,
                config=config.model_dump(mode="json"),
                task_data=[{"n": n} for n in range(4)],
                base_model=model,
                steps=config.steps,
            )
            self.epoch = trainer_epochs.begin_epoch(conn, self.id)

    def train(self, until: int, *, hold: bool = False) -> None:
        """Train and publish the steps up to `until`."""
        done = self.database.query(runs.get, self.id).published_step
        for step in range(done + 1, until + 1):
            while (
                step_id := self.database.transact(
                    steps.lease, self.id, self.epoch, step=step, n_groups=2, max_staleness=0, discount=1.0
                )
            ) is None:
                time.sleep(0.005)
            batch = self.database.query(steps.batch, step_id)
            trained = [
                TrainedTrajectory(
                    trajectory_id=t.trajectory_id,
                    advantage=0.0,
                    staleness_max=0,
                    staleness_mean=0.0,
                    tokens_trained=int(t.loss_mask.sum()),
                )
                for t in batch.trajectories
            ]
            facts = TrainedBatch(
                step_id=step_id, digest=batch.digest(), estimator="grpo", wasted_tokens=0, trained=trained
            )
            version = self.database.query(version_states.next_version, self.id)
            path = self.folder / f"v{version}"
            path.mkdir(exist_ok=True)
            self.database.transact(
                steps.complete, self.id, self.epoch, facts, metrics={}, version=version, path=str(path), checksum="c"
            )
            while hold and self.database.query(evaluation_episodes.paused, self.id, version, self.config):
                time.sleep(0.01)
            self.publish(version)
        self.database.transact(runs.set_status, self.id, "finished")

    def publish(self, version: int) -> None:
        headers = {"Authorization": "Bearer admin-key"}
        body = {"version": version, "epoch": self.epoch}
        httpx.post(f"{self.url}/admin/publish", json=body, headers=headers, timeout=120).raise_for_status()

    def get(self, path: str) -> Any:
        headers = {"Authorization": "Bearer run-key"}
        return httpx.get(f"{self.url}/api/runs/{self.id}/{path}", headers=headers).raise_for_status().json()

    def evaluations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("evaluations")
        return found
