"""A run with a real store and a trainer in this process, for tests of the loop."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from proxy_stub import ADMIN_KEY, PublishStub, make_run, play_groups
from safetensors.torch import load_file
from sqlalchemy import text

from agentrl.configs.run_config import RunConfig
from agentrl.domain.evaluation import Episode, Label
from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts, session_limits
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import rewards, steps
from agentrl.trainer.distributed import World
from agentrl.trainer.loop import train
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.stop import Stop
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import TrainingRun


class Died(Exception):
    """Stands for kill -9: nothing after it runs."""


PLAYED = tempfile.TemporaryDirectory(prefix="agentrl-played-")


@cache
def played(steps: int) -> tuple[Path, str]:
    """A database file of a run of so many steps whose groups are all ready, and the run's id; made once per process."""
    file = Path(PLAYED.name) / f"{steps}.db"
    database = Database(f"sqlite:///{file}")
    database.upgrade()
    run_id = make_run(database, steps=steps)
    play_groups(database, run_id, 2 * steps)
    database.close()  # so nothing of it is in a write-ahead log
    return file, run_id


class Setup:
    """A run of `steps` steps of two groups, all of them ready."""

    def __init__(self, folder: Path, model: Path, world: World, *, refuse: int = 0, steps: int = 3) -> None:
        self.config = RunConfig(
            name="test",
            model=str(model),
            agent="a:B",
            tasks="t",
            steps=steps,
            runs_dir=folder,
            trainer={
                "groups_per_step": 2,
                "max_staleness": steps + 2,
                "lr": 1e-3,
                "train_layers": 2,
                "checkpoint_every": 1,
            },
        )
        self.model, self.world = model, world
        file, self.run_id = played(steps)
        shutil.copyfile(file, folder / "store.db")
        self.database = Database(f"sqlite:///{folder}/store.db")
        self.stop = Stop()
        self.said: list[str] = []
        self.proxy = PublishStub(self.database, self.run_id, refuse=refuse)

    def train(self, *, from_base: bool = False, **settings: Any) -> bool:
        """A fresh trainer."""
        config = self.config.model_copy(update={"trainer": self.config.trainer.model_copy(update=settings)})
        publisher = Publisher(self.proxy.url, ADMIN_KEY, self.stop.wait, self.said.append)
        return train(
            config,
            self.model,
            self.world,
            StoredLineage.begin(self.database, config),
            publisher,
            self.stop,
            from_base=from_base,
        )

    def evaluate(self, step: int, version: int, episodes: int = 2, reward: float | None = None) -> None:
        """Some episodes of an evaluation of two."""
        limits = session_limits.Limits.of(self.config)
        for index in range(episodes):
            label = Label(step, version, Episode("s", index, 0), 2)

            def unit(conn: Any, metadata: Any = label.metadata) -> None:
                group = group_starts.start_evaluation(conn, self.run_id, limits, [codec.new_id()], {}, metadata, None)
                (session_id,) = group.session_ids
                if reward is not None:
                    rewards.add(conn, session_id, value=reward, discount=1.0)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)

            self.database.transact(unit)

    def step_metrics(self, name: str) -> list[float]:
        """A metric of each published step."""
        rows = self.query("SELECT metrics FROM steps WHERE state = 'published' ORDER BY step")
        return [json.loads(found)[name] for (found,) in rows]

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows."""
        with self.database.read() as conn:
            return [tuple(row) for row in conn.execute(text(sql))]

    def steps(self) -> list[tuple[Any, ...]]:
        """The surviving lineage."""
        with self.database.read() as conn:
            return [(s.step, s.state, s.version_before, s.version_after) for s in steps.of_run(conn, self.run_id)]


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def same(weights: dict[str, torch.Tensor], folder: Path) -> bool:
    """Whether the folder's weights are these, bit for bit."""
    found = load_file(folder / "model.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[k], weights[k]) for k in weights)


def die_before(monkeypatch: pytest.MonkeyPatch, setup: Setup, step: int, **settings: Any) -> None:
    """Train until `step` has its batch; then the trainer is gone."""
    real = TrainingRun.update

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step == step:
            raise Died
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "update", update)
        with pytest.raises(Died):
            setup.train(**settings)
