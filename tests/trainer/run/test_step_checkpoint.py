"""Checkpoints of a run: their digests in the store, writing beside the next steps, and the best evaluated one."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from loop_setup import Died, Setup, die_before

from agentrl.configs.evaluation_config import EvalConfig
from agentrl.errors import StoreError, UserError
from agentrl.store.training import checkpoint_rows
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import META, STATE
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import TrainingRun


@pytest.fixture
def n_steps() -> int:
    return 5


def root_of(setup: Setup) -> Path:
    return setup.config.run_dir / "checkpoints"


def recorded(setup: Setup) -> dict[int, str]:
    """The digests in the store, by step."""
    return dict(setup.query("SELECT step, digest FROM checkpoints JOIN steps ON steps.id = step_id ORDER BY step"))


def kept(setup: Setup) -> list[int]:
    return [int(folder.name[5:11]) for folder in checkpoint_folders.folders(root_of(setup))]


@pytest.mark.parametrize("every", [1, 2, "auto"])
def test_the_store_has_the_digest_of_every_checkpoint(setup: Setup, every: Any) -> None:
    assert setup.train(checkpoint_every=every, keep_checkpoints=9)
    found = {step: checkpoint_folders.read(folder) for step, folder in zip(kept(setup), _folders(setup), strict=True)}
    assert {step: one.digest for step, one in found.items()} == recorded(setup)
    assert found.keys() >= ({1, 2, 3, 4, 5} if every == 1 else {2, 4, 5} if every == 2 else {1, 5})
    newest = setup.database.query(checkpoint_rows.newest, setup.run_id)
    assert newest is not None
    assert (newest["step"], newest["digest"], newest["size_bytes"]) == (5, found[5].digest, found[5].size_bytes)
    assert newest["stored_at"] is None


def _folders(setup: Setup) -> list[Path]:
    return checkpoint_folders.folders(root_of(setup))


def test_a_checkpoint_that_is_not_the_recorded_one_is_set_aside(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    die_before(monkeypatch, setup, 3)
    newest = _folders(setup)[-1]
    meta = json.loads((newest / META).read_text())
    (newest / META).write_text(json.dumps(meta | {"metrics": {"loss": 0.0}}))
    assert setup.train()
    said = capsys.readouterr().out
    assert f"ignoring checkpoint {newest}: its digest is" in said
    assert newest.with_name(f"stray-{newest.name}").is_dir()
    assert "rolled back steps [2, 3]" in said


@pytest.mark.parametrize("verify", [True, False])
def test_changed_bytes_are_found_where_a_run_asks_for_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verify: bool
) -> None:
    die_before(monkeypatch, setup, 3)
    newest = _folders(setup)[-1]
    (state,) = (newest / STATE).glob("*.distcp")
    data = bytearray(state.read_bytes())
    data[-1] ^= 1  # of the end of the last tensor's archive, which torch does not read
    state.write_bytes(data)
    die_before(monkeypatch, setup, 3, verify_checkpoint=verify)
    assert (f"{state.name} has changed since it was written" in capsys.readouterr().out) == verify


def test_a_checkpoint_that_was_not_recorded_is_recorded_by_the_next_trainer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StoredLineage, "checkpointed", lambda *_: None)
        die_before(monkeypatch, setup, 3)
    assert recorded(setup) == {}
    die_before(monkeypatch, setup, 3)
    assert recorded(setup).keys() == {2}


def test_by_cost_no_step_waits_for_a_checkpoint_and_one_that_is_written_is_found(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread completes the folder; the trainer need not come to its next save."""
    may_settle, settled = threading.Event(), threading.Event()
    settle = checkpoint_writer.settle

    def slow(draft: Path, folder: Path) -> None:
        assert may_settle.wait(60)
        settle(draft, folder)
        settled.set()

    monkeypatch.setattr(checkpoint_writer, "settle", slow)
    real = TrainingRun.update

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step == 3:
            assert kept(setup) == []  # steps 1 and 2 are published without a checkpoint
            may_settle.set()
            assert settled.wait(60)
            raise Died
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "update", update)
        with pytest.raises(Died):
            setup.train(checkpoint_every="auto")
    assert setup.proxy.published == [1, 2]
    assert kept(setup) == [1]
    assert setup.train(checkpoint_every="auto")
    rolled_back = setup.query("SELECT step FROM steps WHERE state = 'rolled_back' ORDER BY step")
    assert rolled_back == [(2,), (3,)]  # the third had only begun
    assert setup.query("SELECT trajectory_id FROM step_trajectories GROUP BY 1 HAVING count(*) > 2") == []


def test_a_checkpoint_that_cannot_be_written_ends_the_trainer_at_the_next_save(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "settle", full)
    with pytest.raises(StoreError, match=r"step-000001-\w+ cannot be written \(rank 0: .*No space left"):
        setup.train(checkpoint_every="auto")
    monkeypatch.undo()
    assert setup.train()
    assert [step for step, *_ in setup.steps()] == [1, 2, 3, 4, 5]


def evaluated(setup: Setup, every: int) -> None:
    evaluation = EvalConfig(tasks="t:held_out", every=every)
    setup.config = setup.config.model_copy(update={"evaluation": evaluation})


def test_the_best_evaluated_checkpoint_is_kept_though_its_result_comes_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(setup, every=1)
    real = StoredLineage.wait_for_batch
    seen: list[list[int]] = []

    def wait_for_batch(self: StoredLineage, step: int, *args: Any) -> Any:
        seen.append(kept(setup))
        if step == 3:
            setup.evaluate(1, 1, reward=0.2)
            setup.evaluate(2, 2, episodes=1, reward=0.9)  # goes on while steps 3 to 5 are trained
        return real(self, step, *args)

    monkeypatch.setattr(StoredLineage, "wait_for_batch", wait_for_batch)
    assert setup.train(keep_best="evaluation/s/reward")
    assert seen == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert kept(setup) == [1, 2, 4, 5]


def test_of_complete_evaluations_the_best_is_kept_and_one_that_was_given_up_is_not(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(setup, every=1)
    real = StoredLineage.wait_for_batch

    def wait_for_batch(self: StoredLineage, step: int, *args: Any) -> Any:
        if step == 2:
            setup.evaluate(1, 1, episodes=1, reward=1.0)  # its worker dies
        if step in (3, 4):
            setup.evaluate(step - 1, step - 1, reward=0.9 if step == 3 else 0.4)
        return real(self, step, *args)

    monkeypatch.setattr(StoredLineage, "wait_for_batch", wait_for_batch)
    assert setup.train(keep_best="evaluation/s/reward")
    assert kept(setup) == [2, 4, 5]


def test_steps_that_are_evaluated_leave_a_checkpoint_where_the_best_of_them_is_kept(setup: Setup) -> None:
    evaluated(setup, every=2)
    assert setup.train(checkpoint_every=50, keep_best="evaluation/s/reward", keep_checkpoints=9)
    assert kept(setup) == [2, 4, 5]


def test_an_unknown_metric_is_named(setup: Setup) -> None:
    with pytest.raises(UserError, match=r"keep_best: steps have no metric 'reward/of'"):
        setup.train(keep_best="reward/of")
