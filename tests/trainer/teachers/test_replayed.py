"""A run with a teacher is replayed from the store: its advantages byte for byte, and under another credit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_setup import Setup
from support import save_tiny_model

from agentrl import past_batches
from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import FACTS
from agentrl.domain.selection import StepRange
from agentrl.errors import UserError
from agentrl.store import runs
from agentrl.store.training import token_facts
from agentrl.trainer.models import run_models
from agentrl.trainer.run import trainer_start


@pytest.fixture
def n_steps() -> int:
    return 2


@pytest.fixture
def taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a taught run; the folders have no tokenizers."""
    monkeypatch.setattr(run_models, "resolve_model", Path)
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    monkeypatch.setattr(trainer_start, "resolve_model", Path)
    return {"teacher": str(save_tiny_model(tmp_path / "teacher", seed=5))}


def replayed(setup: Setup, algorithm: Algorithm, credit: past_batches.Credit) -> Any:
    """Each step with its batch and its recomputed credit."""
    database = setup.database
    with database.write() as conn:
        config = dict(runs.get(conn, setup.run_id).config) | {"trainer": {"algorithm": algorithm.model_dump()}}
        conn.execute(runs.runs.update().where(runs.runs.c.id == setup.run_id).values(config=config))
    for step in past_batches.chosen_steps(database, database.query(runs.get, setup.run_id), StepRange(1, None)):
        checked = past_batches.check(database, step)
        assert checked.fault is None
        yield step, checked.batch, past_batches.recredit(database, step, checked.batch, credit)


@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        ({"preset": "grpo", "reward_weight": 0.3}, {"minibatches": 2}),
        ({"preset": "m2po", "normalization": "whiten"}, {}),  # against the behaviour policy
        ({"preset": "grpo", "proximal": "interpolate"}, {}),
    ],
    ids=["minibatches", "behavior", "interpolate"],
)
def test_advantages_with_a_teacher_are_replayed_byte_for_byte(
    setup: Setup, taught: dict[str, Any], parts: dict[str, Any], settings: dict[str, Any]
) -> None:
    algorithm = Algorithm(distill_coef=0.5, **parts)
    assert setup.train(algorithm=algorithm, **taught, **settings)
    compared = 0
    for step, batch, again in replayed(setup, algorithm, past_batches.Credit()):
        facts = setup.database.query(
            token_facts.of_trajectories, {t.trajectory_id: step.id for t in batch.trajectories}
        )
        for t, advantages in zip(again.trajectories, again.of_tokens, strict=True):
            trained = facts[t.trajectory_id].trained
            assert advantages[t.loss_mask].tobytes() == trained[FACTS.index("advantage")].tobytes()
            compared += int(t.loss_mask.sum())
        assert {c.old_advantage for c in again.changes} == {c.new_advantage for c in again.changes}
    assert compared > 50


def test_another_credit_keeps_the_teachers_part(setup: Setup, taught: dict[str, Any]) -> None:
    algorithm = Algorithm(distill_coef=0.5)
    assert setup.train(algorithm=algorithm, **taught)
    plain = {step.step: again for step, _, again in replayed(setup, algorithm, past_batches.Credit())}
    for step, _, again in replayed(setup, algorithm, past_batches.Credit(estimator="rloo")):
        for t, a, b, old, new in zip(
            again.trajectories,
            plain[step.step].of_tokens,
            again.of_tokens,
            plain[step.step].advantages,
            again.advantages,
            strict=True,
        ):
            turns = t.turn_ids[t.loss_mask]
            np.testing.assert_allclose((b - a)[t.loss_mask], new[turns] - old[turns], atol=1e-6)


def test_a_taught_step_whose_facts_were_left_out_is_refused_by_name(setup: Setup, taught: dict[str, Any]) -> None:
    algorithm = Algorithm(distill_coef=0.5)
    facts = setup.config.trainer.token_facts.model_copy(update={"sample": 1})
    assert setup.train(algorithm=algorithm, token_facts=facts, **taught)
    with pytest.raises(UserError, match=r"step 1 was trained with a teacher, .* left out \(trainer\.token_facts\)"):
        list(replayed(setup, algorithm, past_batches.Credit()))
