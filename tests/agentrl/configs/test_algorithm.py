"""The definition of an algorithm: presets, overrides, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.config_files import load_config, parse_config
from agentrl.configs.presets import PRESETS
from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.launch import run_folder

BASE: dict[str, Any] = {"name": "r", "model": "tiny", "agent": "a:A", "tasks": "a:t"}


def run(algorithm: Any) -> RunConfig:
    return parse_config(BASE | {"trainer": {"algorithm": algorithm}})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_parts(name: str) -> None:
    algorithm = Algorithm(preset=name)
    assert algorithm.preset == name
    for part, value in PRESETS[name].parts.items():
        assert getattr(algorithm, part) == value
    assert Algorithm.model_validate(name) == algorithm


def test_only_ppo_needs_another_model() -> None:
    algorithms = [Algorithm(preset=name) for name in PRESETS]
    assert [a.preset for a in algorithms if a.needs_critic] == ["ppo"]
    assert not [a.preset for a in algorithms if a.needs_reference]


def test_parts_override_their_preset() -> None:
    algorithm = run({"preset": "dapo", "clip_low": 0.1, "dynamic_sampling": False}).trainer.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dynamic_sampling) == (0.1, 0.28, False)
    assert algorithm.aggregation == "token_mean"


@pytest.mark.parametrize("written", ["dapo", {"preset": "dapo"}])
def test_a_part_of_a_named_preset_can_be_given_on_the_command_line(tmp_path: Path, written: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE | {"trainer": {"algorithm": written}}))
    config = load_config(path, ["trainer.algorithm.clip_high=0.4"])
    assert (config.trainer.algorithm.preset, config.trainer.algorithm.clip_high) == ("dapo", 0.4)
    assert load_config(path, ["trainer.algorithm=gspo"]).trainer.algorithm == Algorithm(preset="gspo")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("grppo", "config key 'trainer.algorithm': Value error, no algorithm 'grppo'; did you mean 'grpo'?"),
        ({"clip_hihg": 1}, "unknown config key 'trainer.algorithm.clip_hihg'; did you mean 'clip_high'?"),
        (
            {"aggregation": "token_men"},
            "config key 'trainer.algorithm.aggregation': there is no 'token_men'; did you mean 'token_mean'?",
        ),
        ({"baseline": "critic"}, "estimator gae and baseline critic go together"),
        ({"preset": "ppo", "normalization": "group_std"}, "use whiten or none with gae"),
        ({"kl_target": 0.1}, "kl_target needs a kl_coef above 0"),
        (
            {"kl_target": 0.1, "kl_coef": 0.1, "loss": "mine:loss"},
            "kl_target controls the divergence that",
        ),
        ({"kl_refresh_steps": 5}, "kl_refresh_steps needs a kl_coef above 0"),
        ({"dual_clip": 1.1}, "dual_clip needs"),
        ({"dual_clip": 3.0, "clip": "sapo"}, "dual_clip needs"),
        ({"proximal": "behavior"}, "needs correction: none"),
        ({"correction_floor": 0.5}, "correction_floor applies to mask and reject"),
        ({"correction": "mask", "correction_floor": 5.0}, "correction_floor must be less"),
        ({"overlong_tokens": 100, "overlong_buffer": 200}, "overlong_buffer is larger than overlong_tokens"),
        (
            {"baseline": "none", "normalization": "whiten", "dynamic_sampling": True},
            "dynamic_sampling would drop groups",
        ),
        ({"baseline": "max_at_k"}, "max_at_k needs credit: trajectory and normalization: none or whiten"),
        ({"preset": "pkpo", "baseline_shift": 0.1}, "baseline_shift does not apply to baseline max_at_k"),
        ({"preset": "pkpo", "best_of": 1}, "config key 'trainer.algorithm.best_of'"),
        ({"preset": "reinforce++", "rescale_tied": True}, "rescale_tied needs a baseline that comes from the group"),
        ({"preset": "gmpo", "ratio": "sequence"}, "clip geometric needs ratio: token"),
        ({"positive_weight": 0, "negative_weight": 0}, "positive_weight and negative_weight are both 0"),
        ({"correction_normalize": True, "correction": "reject"}, "correction_normalize needs weights"),
        ({"bootstrap_truncated": True}, "bootstrap_truncated needs a critic, whose values it uses: estimator gae"),
        ({"advantage_level": "turn"}, "advantage_level: turn needs a critic: estimator gae"),
        ({"masked_in_mean": "none"}, "masked_in_mean: none needs correction mask or reject, or m2_threshold"),
        ({"clip_cov": 0.1, "clip_cov_low": 6.0}, "clip_cov_low must be less than clip_cov_high"),
        ({"preset": "gspo", "kl_cov": 0.1}, "clip_cov and kl_cov need ratio: token"),
        ({"distill_divergence": "forward"}, "distill: sampled has the reverse divergence of all tokens"),
        ({"reward_weight": 0}, "reward_weight: 0 needs a distill_coef above 0"),
        ({"distill_coef": 1, "advantage": "a:b"}, "cannot be used with distill: sampled"),
        ({"normalization": "per_reward"}, "normalization per_reward needs credit: trajectory"),
        ({"preset": "gdpo", "kl_coef": 0.1, "kl": "reward"}, "normalization per_reward needs kl: loss"),
        ({"reward_weights": {"a": 1}}, "reward_weights needs normalization: per_reward"),
        ({"preset": "reinforce++", "step_weight": 1}, "step_weight needs a baseline that comes from the group"),
        ({"clip_low": 1.5}, "config key 'trainer.algorithm.clip_low'"),
    ],
)
def test_parts_that_exclude_each_other_are_refused_in_one_line(algorithm: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(algorithm)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("trainer", [{"teacher": "tiny"}, {"algorithm": {"distill_coef": 1.0}}])
def test_a_teacher_and_its_coefficient_go_together(trainer: Any) -> None:
    with pytest.raises(ConfigError, match=r"teacher and an algorithm\.distill_coef above 0 go together"):
        parse_config(BASE | {"trainer": trainer})
    assert parse_config(BASE | {"trainer": {"teacher": "tiny", "algorithm": {"distill_coef": 1.0}}}).trainer.teacher


def test_a_reference_without_a_kl_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reference needs an algorithm\.kl_coef above 0"):
        parse_config(BASE | {"trainer": {"reference": "elsewhere"}})
    assert parse_config(BASE | {"trainer": {"reference": "elsewhere", "algorithm": {"kl_coef": 0.1}}})


def test_the_written_config_names_every_part_and_reads_the_same(tmp_path: Path) -> None:
    config = parse_config(
        BASE | {"runs_dir": str(tmp_path), "trainer": {"algorithm": {"preset": "m2po", "m2_threshold": 0.1}}}
    )
    run_folder.write_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.m2_threshold=0\.1, not 0\.04"):
        run_folder.check_resume(config.model_dump(mode="json"), parse_config(BASE | {"trainer": {"algorithm": "m2po"}}))
