"""A run with a teacher, scaled rewards, replays, controllers and averages at once: killed and resumed, it has the same
metrics and weights, and its advantages are replayed byte for byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loop_setup import Setup, die_before, same
from safetensors.torch import load_file
from sqlalchemy import text
from support import save_tiny_model

from agentrl import past_batches
from agentrl.configs.algorithm import Algorithm
from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.configs.rollout_config import ReplayConfig
from agentrl.configs.run_config import RunConfig
from agentrl.configs.trainer_config import AverageConfig, NoiseScaleConfig
from agentrl.domain.schemas import FACTS
from agentrl.domain.selection import StepRange
from agentrl.store import runs
from agentrl.store.audit import run_audit
from agentrl.store.training import token_facts
from agentrl.trainer.distributed import World
from agentrl.trainer.models import run_models
from agentrl.trainer.run import trainer_start

ALGORITHM = Algorithm(
    preset="grpo",
    distill_coef=0.5,
    reward_weight=0.7,
    kl_coef=0.1,
    kl_target=0.05,
    clip_cov=0.1,
    correction="mask",
    masked_in_mean="trajectories",
)
MEASURED = ("time/", "publish/", "tokens_per_s", "memory")


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The trainer's; the folders have no tokenizers."""
    monkeypatch.setattr(run_models, "resolve_model", Path)
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    monkeypatch.setattr(trainer_start, "resolve_model", Path)
    return {
        "algorithm": ALGORITHM,
        "teacher": str(save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)),
        "average": AverageConfig(decay=0.9),
        "noise_scale": NoiseScaleConfig(reference_batch=4),
        "tokens_per_microbatch": 24,
        "minibatches": 2,
    }


def with_all(setup: Setup, settings: dict[str, Any]) -> Setup:
    """The run with all parts, which its record has too."""
    rollout = setup.config.rollout.model_copy(update={"replay": ReplayConfig(rate=0.7)})
    reward = RewardConfig(function="exact", normalize="running", clip=(-1.0, 1.0))
    trainer = setup.config.trainer.model_copy(update=settings)
    changed = {"rollout": rollout, "reward": reward, "trainer": trainer}
    setup.config = RunConfig.model_validate(setup.config.model_copy(update=changed).model_dump())
    with setup.database.write() as conn:
        config = json.dumps(setup.config.model_dump(mode="json"))
        conn.execute(text("UPDATE runs SET config = :config"), {"config": config})
    return setup


def learned(setup: Setup) -> list[dict[str, float]]:
    """The metrics of the published steps, but those of time and place."""
    rows = setup.query("SELECT metrics FROM steps WHERE state = 'published' ORDER BY step")
    metrics = [json.loads(found) for (found,) in rows]
    return [{k: v for k, v in one.items() if not any(part in k for part in MEASURED)} for one in metrics]


def test_a_killed_run_goes_on_to_the_same_metrics_and_weights(
    setup: Setup,
    settings: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    world: World,
) -> None:
    whole = with_all(Setup(tmp_path_factory.mktemp("whole"), setup.model, world), settings)
    with whole.proxy:
        assert whole.train()
    with_all(setup, settings)
    die_before(monkeypatch, setup, 3)
    assert setup.train()
    expected = load_file(whole.config.run_dir / "model" / "model.safetensors")
    assert same(expected, setup.config.run_dir / "model")
    assert learned(setup) == learned(whole)
    last = learned(whole)[-1]
    assert {"kl_teacher", "kl_coef", "replayed_groups", "noise_scale", "reward/running_std/reward"} <= last.keys()
    with setup.database.read() as conn:
        assert list(run_audit.scan(conn, setup.run_id)) == []
    whole.database.close()


def test_its_advantages_are_replayed_byte_for_byte(setup: Setup, settings: dict[str, Any]) -> None:
    with_all(setup, settings)
    assert setup.train()
    database, compared = setup.database, 0
    for step in past_batches.chosen_steps(database, database.query(runs.get, setup.run_id), StepRange(1, None)):
        checked = past_batches.check(database, step)
        assert checked.fault is None
        again = past_batches.recredit(database, step, checked.batch, past_batches.Credit())
        facts = database.query(
            token_facts.of_trajectories, {t.trajectory_id: step.id for t in checked.batch.trajectories}
        )
        for t, advantages in zip(again.trajectories, again.of_tokens, strict=True):
            trained = facts[t.trajectory_id].trained[FACTS.index("advantage")]
            assert advantages[t.loss_mask].tobytes() == trained.tobytes()
            compared += int(t.loss_mask.sum())
    assert compared > 100
