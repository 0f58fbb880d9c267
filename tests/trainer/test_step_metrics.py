"""The metrics of real steps: all of them in the docs, and the docs' all made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loop_setup import Setup

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.configs.rollout_config import ReplayConfig
from agentrl.store.training import steps
from agentrl.trainer.models import run_models
from agentrl.trainer.run import trainer_start

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ELSEWHERE = {"mfu", "publish/density", "reward/greedy", "noise_scale"}
"""Metrics of some GPUs, of runs whose versions are compared with the ones before, of runs with greedy episodes, and of
updates in microbatches.
"""


@pytest.fixture
def n_steps() -> int:
    return 2


def made(setup: Setup, **settings: object) -> list[dict[str, float]]:
    """The metrics of each step."""
    assert setup.train(**settings)
    return [row.metrics for row in setup.database.query(steps.of_run, setup.run_id)]


def documented() -> set[str]:
    """Names in the table of the docs."""
    table = PAGE.read_text().partition("## Of every step")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def family(name: str) -> str:
    """The name that the docs have for it."""
    for prefix, stands_for in (
        ("reward/name/", "NAME"),
        ("reward/source/", "SOURCE"),
        ("reward/running_mean/", "NAME"),
        ("reward/running_std/", "NAME"),
        ("off_policy/age_", "AGE"),
        ("rollout/", "NAME"),
        ("mismatch/engine/", "ENGINE"),
        ("mismatch/engine_tokens/", "ENGINE"),
        ("mismatch/backend/", "BACKEND"),
        ("mismatch/backend_tokens/", "BACKEND"),
    ):
        if name.startswith(prefix):
            return prefix + stands_for
    return name


def test_documented_metrics_are_exactly_those_that_a_step_makes(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_models, "resolve_model", Path)  # the folder has no tokenizer
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    monkeypatch.setattr(trainer_start, "resolve_model", Path)
    with setup.database.write() as conn:
        conn.exec_driver_sql("""UPDATE tasks SET data = '{"source": "sums"}'""")
        conn.exec_driver_sql("UPDATE interactions SET kv_mixed = true WHERE parent_id IS NOT NULL")
        conn.exec_driver_sql("""UPDATE sessions SET stats = '{"tool_calls": 2.0}'""")
        conn.exec_driver_sql("UPDATE interactions SET engine_url = 'http://e:1', engine_backend = 'vllm'")
    rollout = setup.config.rollout.model_copy(update={"replay": ReplayConfig(rate=0.7)})
    reward = RewardConfig(function="exact", normalize="running")
    setup.config = setup.config.model_copy(update={"reward": reward, "rollout": rollout})
    algorithm = Algorithm(preset="ppo", kl_coef=0.1, kl_target=0.1, distill_coef=0.1)
    found = made(setup, algorithm=algorithm, teacher=str(setup.model))
    assert {family(name) for metrics in found for name in metrics} == documented() - ELSEWHERE


def test_normalised_rewards_train_and_recorded_ones_are_shown(setup: Setup) -> None:
    """Both groups of each step have the rewards 0, 1 and 2, whose deviation is √(2/3)."""
    reward = RewardConfig(function="exact", normalize="running", clip=(-1.0, 5.0))
    setup.config = setup.config.model_copy(update={"reward": reward})
    for found in made(setup):
        assert found["reward/name/reward"] == found["reward/running_mean/reward"] == 1.0
        assert found["reward/running_std/reward"] == pytest.approx((2 / 3) ** 0.5)
        assert found["reward/min"] == -1.0
        assert found["reward/max"] == pytest.approx(1.5**0.5, abs=1e-5)


def test_tokens_over_older_keys_and_values_count_as_drift(setup: Setup) -> None:
    with setup.database.write() as conn:
        conn.exec_driver_sql("UPDATE interactions SET kv_mixed = true WHERE parent_id IS NOT NULL")
    first, _ = made(setup)
    assert first["off_policy/kv_mixed"] == 0.5
    assert first["mismatch_tokens"] == first["drift_tokens"] == first["tokens_trained"] / 2
    assert first["off_policy/mean"] == 0


def test_the_mismatch_is_divided_among_the_engines_that_sampled(setup: Setup) -> None:
    """Their means, weighted by their tokens, are that of the step."""
    with setup.database.write() as conn:
        conn.exec_driver_sql("UPDATE interactions SET engine_url = 'http://e:1', engine_backend = 'sglang'")
        later = "parent_id IS NOT NULL"
        conn.exec_driver_sql(
            f"UPDATE interactions SET engine_url = 'http://e:2', engine_backend = 'vllm' WHERE {later}"
        )
        one = conn.exec_driver_sql(f"SELECT min(id) FROM interactions WHERE {later}").scalar_one()
        spans = '[["http://e:1", "sglang", 0], ["http://e:2", "vllm", 1]]'
        conn.exec_driver_sql("UPDATE interactions SET engine_spans = ? WHERE id = ?", (spans, one))
    first, second = made(setup)
    counted = {name: first[f"mismatch/engine_tokens/{name}"] for name in ("e:1", "e:2", "several")}
    per_call = first["tokens_trained"] / 12
    assert counted == {"e:1": 6 * per_call, "e:2": 5 * per_call, "several": per_call}
    assert sum(first[f"mismatch/engine/{name}"] * n for name, n in counted.items()) / first[
        "mismatch_tokens"
    ] == pytest.approx(first["logprob_mismatch_mean_abs"])
    assert first["mismatch/backend/vllm"] == first["mismatch/engine/e:2"] != first["mismatch/backend/sglang"]
    assert not [name for name in second if name.startswith("mismatch/")]  # all of its tokens are older


def test_a_step_has_metrics_of_rewards_lengths_and_ages(setup: Setup) -> None:
    with setup.database.write() as conn:
        conn.exec_driver_sql("""UPDATE tasks SET data = '{"source": "sums"}'""")
        conn.exec_driver_sql("UPDATE interactions SET finish_reason = 'length' WHERE parent_id IS NULL")
    first, second = made(setup)
    assert first["reward/name/reward"] == first["reward/source/sums"] == first["reward/mean"] == 1.0
    assert first["truncated_fraction"] == 0.5
    assert (first["length/turns_mean"], first["length/prompt_mean"], first["length/output_mean"]) == (2, 6, 8)
    assert first["off_policy/age_0"] == second["off_policy/age_1"] == 1
    assert first["advantage/zero_groups"] == 0
    assert first["mismatch_max"] >= first["logprob_mismatch_mean_abs"] > 0
    assert first["mismatch_kl"] == pytest.approx(first["approx_kl"], rel=1e-4)  # nothing has moved
    assert 0 < first["importance_ratio/ess"] < 1
    assert second["time/wait_for_policy"] > 0


def test_a_step_of_remax_trains_the_samples_against_the_greedy_episodes(setup: Setup) -> None:
    """One episode of each group becomes its greedy one."""
    greedy = "(SELECT id FROM sessions WHERE sample_index = 0)"
    with setup.database.write() as conn:
        conn.exec_driver_sql(f"UPDATE sessions SET is_baseline = true WHERE id IN {greedy}")
        conn.exec_driver_sql(
            f"UPDATE trajectories SET state = 'rejected', reason = 'baseline' WHERE session_id IN {greedy}"
        )
        conn.exec_driver_sql(f"UPDATE rewards SET value = 0.75 WHERE session_id IN {greedy}")
    first, second = made(setup, algorithm=Algorithm(preset="remax"))
    assert first["reward/greedy"] == second["reward/greedy"] == 0.75
    assert first["reward/mean"] - 0.75 == pytest.approx(first["advantage/mean"]) != 0
    with setup.database.read() as conn:
        trained = conn.exec_driver_sql("SELECT count(*) FROM trajectories WHERE state = 'trained'").scalar_one()
        own = conn.exec_driver_sql(f"SELECT DISTINCT state FROM trajectories WHERE session_id IN {greedy}").all()
    assert trained == first["sessions"] + second["sessions"] > 0
    assert [row[0] for row in own] == ["rejected"]
    assert "reward/greedy" in documented()
