"""Groups with a rare success enter a later batch once more: the trainer's steps, metrics, resumes and past batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from loop_setup import Setup, die_before, same
from safetensors.torch import load_file
from sqlalchemy import text

from agentrl import past_batches
from agentrl.configs.rollout_config import ReplayConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.domain.selection import StepRange
from agentrl.store import runs
from agentrl.store.audit import run_audit
from agentrl.trainer.distributed import World
from agentrl.trainer.training_run import TrainingRun

RARE = ReplayConfig(rate=0.7, groups_per_step=2)  # two of three sessions of each group have a reward of 1 or more


def with_replays(setup: Setup) -> Setup:
    rollout = setup.config.rollout.model_copy(update={"replay": RARE})
    setup.config = setup.config.model_copy(update={"rollout": rollout})
    with setup.database.write() as conn:
        config = json.dumps(setup.config.model_dump(mode="json"))
        conn.execute(text("UPDATE runs SET config = :config"), {"config": config})
    return setup


@pytest.fixture
def setup(setup: Setup) -> Setup:
    return with_replays(setup)


def test_a_step_trains_new_groups_and_replays(setup: Setup) -> None:
    assert setup.train()
    counts = dict(setup.query("SELECT step, groups FROM steps WHERE state = 'published'"))
    assert counts == {1: 2, 2: 4, 3: 4}
    metrics = [json.loads(found) for (found,) in setup.query("SELECT metrics FROM steps ORDER BY step")]
    assert [found.get("replayed_groups") for found in metrics] == [None, 2.0, 2.0]
    assert [found["sessions"] for found in metrics] == [6.0] * 3  # of the new groups alone
    assert metrics[1]["tokens_trained"] == 2 * metrics[0]["tokens_trained"]
    trained = Counter(found for (found,) in setup.query("SELECT trajectory_id FROM step_trajectories"))
    assert Counter(trained.values()) == {2: 12, 1: 6}  # the last step's are not trained again
    with setup.database.read() as conn:
        assert list(run_audit.scan(conn, setup.run_id)) == []
    run = setup.database.query(runs.get, setup.run_id)
    for step in past_batches.chosen_steps(setup.database, run, StepRange(1, None)):
        assert past_batches.check(setup.database, step).fault is None


def test_replays_change_what_is_learned_and_a_resume_does_not(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    whole = with_replays(Setup(tmp_path_factory.mktemp("whole"), setup.model, world))
    with whole.proxy:
        assert whole.train()
    whole.database.close()
    plain = Setup(tmp_path_factory.mktemp("plain"), setup.model, world)
    with plain.proxy:
        assert plain.train()
    plain.database.close()
    die_before(monkeypatch, setup, 3)
    assert setup.train()
    expected = load_file(whole.config.run_dir / "model" / "model.safetensors")
    assert same(expected, setup.config.run_dir / "model")
    assert not same(expected, plain.config.run_dir / "model")


def test_refusals_judge_new_groups_alone(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    real = TrainingRun.prepare_batch

    def prepare(run: TrainingRun, should_accept: object = None) -> object:
        groups: set[str] = set()

        def accept(group: Sequence[TrajectoryTokens]) -> bool:
            groups.update(t.group_id for t in group)
            return True

        found = real(run, accept)
        seen.append(groups)
        return found

    monkeypatch.setattr(TrainingRun, "prepare_batch", prepare)
    assert setup.train()
    assert [len(groups) for groups in seen[:3]] == [2, 2, 2]
    assert not seen[0] & seen[1]
