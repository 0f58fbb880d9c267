"""Checkpoints that are written while training goes on, and those that cannot be written. Resuming: test_resume.py."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_setup import Died, Setup, same
from safetensors.torch import load_file
from support import AGES, random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import TrainedBatch
from agentrl.errors import StoreError, UserError
from agentrl.store.training import steps
from agentrl.trainer import loop
from agentrl.trainer.checkpoints import checkpoint, checkpoint_folders, checkpoint_reader, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.checkpoints.checkpoint_writer import Writing
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_policy
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.run.trainer_state import Trainer
from agentrl.trainer.update import update_policy

FACTS = TrainedBatch(step_id="s", digest="d", estimator="grpo", wasted_tokens=0, trained=[])
RECORD = StepRecord(step=1, version=1, batch=FACTS, metrics={})
CONFIG = TrainerConfig(lr=1e-2)


class Run:
    """A policy that is trained."""

    def __init__(self, model: Path, world: World) -> None:
        self.world = world
        self.policy: Policy = load_policy(model, world.mesh)
        self.optimizer = make_optimizer(self.policy, CONFIG)

    def step(self) -> None:
        update_policy(self.policy, self.optimizer, random_samples(), 1, AGES, CONFIG, self.world)

    def begin(self, root: Path, *, wait: bool) -> Writing:
        parts = checkpoint_writer.state_of("policy", self.policy, self.optimizer)
        return checkpoint_writer.begin(root, RECORD, parts, self.world, wait=wait)

    def state(self) -> dict[str, torch.Tensor]:
        parts = checkpoint_writer.state_of("policy", self.policy, self.optimizer)
        return {f"{part}/{name}": t.detach().clone() for part, tensors in parts.items() for name, t in tensors.items()}


@pytest.fixture
def run(tiny_model: Path, world: World) -> Run:
    made = Run(tiny_model, world)
    made.step()
    return made


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_holds_the_state_of_when_it_was_begun(
    run: Run, tiny_model: Path, world: World, tmp_path: Path, wait: bool
) -> None:
    before = run.state()
    torch.manual_seed(5)
    writing = run.begin(tmp_path, wait=wait)
    drawn = torch.rand(3)
    run.step()
    saved = writing.finish()
    assert not list(tmp_path.glob(".*"))
    other = Run(tiny_model, world)
    checkpoint_reader.load(checkpoint_folders.read(saved.folder), other.policy, other.optimizer, world)
    found = other.state()
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert torch.equal(torch.rand(3), drawn)


def test_an_unfinished_checkpoint_is_not_found(run: Run, tmp_path: Path) -> None:
    writing = run.begin(tmp_path, wait=False)
    assert writing.future is not None
    writing.future.result()
    assert checkpoint_folders.newest(tmp_path) == (None, [])
    assert writing.finish() == checkpoint_folders.newest(tmp_path)[0]


@contextmanager
def full_disk(at_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_that_cannot_be_written_raises_and_leaves_no_folder(run: Run, tmp_path: Path, wait: bool) -> None:
    with full_disk(100_000), pytest.raises(StoreError, match=r"step-000001-s cannot be written \(rank 0: .*too large"):
        run.begin(tmp_path, wait=wait).finish()
    assert checkpoint_folders.newest(tmp_path) == (None, [])


def test_a_damaged_state_file_is_named(run: Run, tmp_path: Path) -> None:
    folder = run.begin(tmp_path, wait=True).finish().folder
    (folder / checkpoint.STATE / ".metadata").write_bytes(b"\x80no pickle")
    with pytest.raises(StoreError, match=r"state is damaged"):
        checkpoint_reader.shapes(folder, "policy")


@pytest.mark.parametrize(
    ("asked", "kept"), [(None, [4, 5]), ("reward_mean", [2, 4, 5]), ("-reward_mean", [1, 4, 5]), ("loss", [4, 5])]
)
def test_newest_and_best_checkpoints_are_kept(run: Run, tmp_path: Path, asked: str | None, kept: list[int]) -> None:
    for number, reward in enumerate([0.1, 0.9, 0.2, 0.9 - 1e-9, 0.3], 1):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics={"reward_mean": reward, "loss": number})
        made = checkpoint_writer.begin(tmp_path, record, {}, run.world, wait=True).finish()
        checkpoint_folders.remove_older(made, CONFIG.model_copy(update={"keep_best": asked}))
    assert [int(folder.name[5:11]) for folder in sorted(tmp_path.iterdir())] == kept


def test_a_step_without_the_metric_is_never_the_best(run: Run, tmp_path: Path) -> None:
    for number, metrics in enumerate([{"reward/name/correct": 0.5}, {}, {"reward/name/correct": 0.4}, {}], 1):
        record = StepRecord(step=number, version=number, batch=FACTS, metrics=metrics)
        made = checkpoint_writer.begin(tmp_path, record, {}, run.world, wait=True).finish()
        checkpoint_folders.remove_older(made, CONFIG.model_copy(update={"keep_best": "reward/name/correct"}))
    assert [int(folder.name[5:11]) for folder in sorted(tmp_path.iterdir())] == [1, 3, 4]


def test_an_unknown_metric_deletes_nothing(run: Run, tmp_path: Path) -> None:
    record = StepRecord(step=1, version=1, batch=FACTS, metrics={"reward_mean": 1.0})
    made = checkpoint_writer.begin(tmp_path, record, {}, run.world, wait=True).finish()
    with pytest.raises(UserError, match=r"keep_best: steps have no metric 'reward'; did you mean 'reward_mean'"):
        checkpoint_folders.remove_older(made, CONFIG.model_copy(update={"keep_best": "-reward"}))


# -- in the loop ---------------------------------------------------------------------------------------------------


@pytest.fixture
def n_steps() -> int:
    return 5


def checkpointed(setup: Setup) -> list[float]:
    """Whether each completed step is said to have a checkpoint."""
    with setup.database.read() as conn:
        return [s.metrics["checkpointed"] for s in steps.of_run(conn, setup.run_id) if s.metrics]


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    """What is written behind is never ready, but for who waits for it."""
    asked: list[Future[Any]] = []

    def done(self: Writing) -> bool:
        if self.future is not None:
            asked.append(self.future)
        return self.future is None

    monkeypatch.setattr(Writing, "done", done)
    return asked


def test_training_continues_while_a_checkpoint_is_written(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = slow_disk(monkeypatch)
    known: list[list[float]] = []
    real = loop.publish

    def publish(t: Trainer, version: int, tensors: Any) -> None:
        real(t, version, tensors)
        known.append(checkpointed(setup))

    monkeypatch.setattr(loop, "publish", publish)
    assert setup.train(checkpoint_every=2)
    assert setup.proxy.published == [1, 2, 3, 4, 5]
    assert known == [[0], [0, 0], [0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1, 1]]  # the next one waits for the one before
    assert asked
    assert checkpointed(setup) == known[-1]


def test_a_trainer_killed_while_writing_a_checkpoint_resumes_from_the_one_before(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world, steps=5)
    with whole.proxy:
        assert whole.train()
    whole.database.close()
    real = loop.train_step

    def train_step(t: Trainer, batch: Any, waited_s: float) -> None:
        if batch.step == 5:
            assert t.writing is not None
            assert t.writing.future is not None
            t.writing.future.result()  # a thread of a process that dies would be dead too
            raise Died
        real(t, batch, waited_s)

    with monkeypatch.context() as patch:
        slow_disk(patch)
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(Died):
            setup.train(checkpoint_every=2)
    assert checkpointed(setup) == [0, 1, 0, 0]
    assert setup.train(checkpoint_every=2)
    rolled_back = setup.query("SELECT step FROM steps WHERE state = 'rolled_back' ORDER BY step")
    assert [step for (step,) in rolled_back] == [3, 4, 5]
    assert not list((setup.config.run_dir / "checkpoints").glob(".*"))
    assert same(load_file(whole.config.run_dir / "model" / "model.safetensors"), setup.config.run_dir / "model")
    assert (
        setup.query(
            "SELECT trajectory_id FROM step_trajectories JOIN steps ON steps.id = step_id "
            "WHERE state != 'rolled_back' GROUP BY 1 HAVING count(*) > 1"
        )
        == []
    )
