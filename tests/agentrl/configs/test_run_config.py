"""Configuration: strict, documented, one-line errors that name the field."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.configs.config_files import load_config, parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError

BASE: dict[str, Any] = {"name": "r", "model": "tiny", "agent": "a:A", "tasks": "a:t"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("name: r\nmodel: tiny\nagent: a:A\ntasks: a:t\ntrainer:\n  lr: 1.0e-4\n")
    return file


def test_overrides_win_and_are_yaml(path: Path) -> None:
    run = load_config(
        path, ["trainer.lr=2e-4", "engine.urls=[http://a, http://b]", "steps=7", "trainer.algorithm.clip_low=0.1"]
    )
    assert (run.trainer.lr, run.engine.urls, run.steps) == (2e-4, ["http://a", "http://b"], 7)
    assert run.trainer.algorithm.clip_low == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "unknown config key 'stepz'; did you mean 'steps'?"),
        ({"trainer": {"max_stalenes": 1}}, "unknown config key 'trainer.max_stalenes'; did you mean 'max_staleness'?"),
        ({"rollout": {"sampling": {"temprature": 1}}}, "did you mean 'temperature'"),
        ({"steps": -1}, "config key 'steps': Input should be greater than or equal to 0"),
        ({"trainer": {"lr": "fast"}}, "config key 'trainer.lr'"),
        ({"trainer": {"lora": {"publish": "adapter"}}}, "publish: adapter needs a rank above 0"),
        ({"trainer": {"keep_best": "-evaluation/s/reward"}}, "keep_best: -evaluation/s/reward needs evaluations"),
        ({"publish": {"lag": 2}}, "publish.lag: 2 is more than trainer.max_staleness: 1"),
        (
            {"publish": {"lag": 1}, "trainer": {"lora": {"rank": 4, "publish": "adapter"}}},
            "publish.lag: needs whole weights",
        ),
        ({"publish": {"lag": 1, "transport": "tensor"}}, "publish.lag: needs publish.transport: disk"),
        (
            {"trainer": {"algorithm": {"preset": "pkpo", "best_of": 9}}},
            "trainer.algorithm.best_of: 9 is more than rollout.group_size: 8",
        ),
        ({"publish": {"serving_share": 1.5}}, "config key 'publish.serving_share'"),
        ({"name": "../x"}, "config key 'name'"),
        ({"model": None}, "config key 'model'"),
    ],
)
def test_a_bad_key_is_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE | changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engines_may_lag_as_far_as_the_staleness_allows() -> None:
    for changes in ({"trainer": {"max_staleness": 2}}, {"steps": 0}):
        assert parse_config(BASE | {"publish": {"lag": 2}} | changes).publish.lag == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "must look like section.key=value"),
        ("steps.x=1", "'steps' is a value, not a section"),
        ("steps=[", "is not a YAML value"),
        ("name=2026-13-01", "'2026-13-01' is not a YAML value"),
    ],
)
def test_a_bad_override_is_refused(path: Path, override: str, message: str) -> None:
    path.write_text(path.read_text() + "steps: 3\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1, 2]", "must hold a mapping"),
        (b"a: [", "is not valid YAML"),
        (b"name: 2026-13-01", "is not valid YAML: month must be"),
        (b"a: " + b"[" * 5000, "is not valid YAML"),
        (b"name: \xff", "cannot read config .*: 'utf-8' codec can't decode byte 0xff"),
        (None, "cannot read config"),
    ],
    ids=["a list", "cut", "a date", "deep", "not text", "absent"],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, text: bytes | None, message: str) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "path",
    ["trainer.lr", "trainer.weight_decay", "trainer.algorithm.kl_coef", "rollout.timeout_s", "proxy.max_reward"],
)
def test_a_number_that_is_not_finite_is_refused(path: str, value: float) -> None:
    data: Any = value
    for key in reversed(path.split(".")):
        data = {key: data}
    with pytest.raises(ConfigError, match=f"config key '{path}'"):
        parse_config({"name": "r", "model": "tiny", **data})


@pytest.mark.parametrize(
    "data", [{"seed": 2**63}, {"trainer": {"algorithm": {"overlong_penalty": 1e308}}}, {"proxy": {"max_reward": 1e13}}]
)
def test_a_number_above_its_bound_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="less than"):
        parse_config({"name": "r", "model": "tiny", **data})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config(BASE).steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(("name", "most_steps"), [("demo.yaml", 15), ("demo-quick.yaml", 45)])
def test_the_packaged_configs_are_valid_and_stay_short(name: str, most_steps: int) -> None:
    text = (files("agentrl.agents") / name).read_text()
    assert RunConfig.model_validate(yaml.safe_load(text)).steps <= most_steps


def test_a_group_must_be_able_to_reach_its_smallest_size() -> None:
    with pytest.raises(ConfigError, match="min_group_size 4 is larger than group_size 2"):
        parse_config(
            {
                "name": "r",
                "model": "tiny",
                "agent": "a:B",
                "tasks": "t",
                "rollout": {"group_size": 2, "min_group_size": 4},
            }
        )


COMPONENTS = {"right": {"function": "math"}, "form": {"function": "json_schema"}, "taste": {"function": "judge"}}


@pytest.mark.parametrize(
    ("best_of", "changes", "message"),
    [
        ({"by": "tast"}, {}, "best_of.by: no component of reward is called 'tast'; did you mean 'taste'"),
        ({"by": "form", "rewards": ["wright"]}, {}, "best_of.rewards: no component.*'wright'; did you mean 'right'"),
        ({"by": "taste", "rewards": ["right", "taste"]}, {}, "'taste' is the score to choose by"),
        ({"by": "reward"}, {"reward": "math"}, "'reward' is the only reward"),
        ({"by": "taste"}, {"samples": 1}, "set samples to at least 2"),
        ({"by": "taste", "reward": ["right"]}, {}, "did you mean 'rewards'"),
        ({"by": "taste"}, {}, None),
        ({"by": "taste.fluent", "rewards": ["right"]}, {}, None),
        ({"by": "anything"}, {"agent": "a:A"}, None),
        ({"by": "anything"}, {"reward": None, "agent": "a:A"}, None),
    ],
)
def test_samples_are_chosen_by_a_known_score(
    best_of: dict[str, Any], changes: dict[str, Any], message: str | None
) -> None:
    changes = {"samples": 4, "reward": {"components": COMPONENTS}, **changes}
    evaluation = {"tasks": "a:t", "samples": changes.pop("samples"), "best_of": best_of}
    given = {"name": "r", "model": "tiny", "tasks": "a:t", "evaluation": evaluation, **changes}
    if message is None:
        assert parse_config(given).evaluation.best_of is not None
        return
    with pytest.raises(ConfigError, match=message):
        parse_config(given)
