"""A traced step: its peak against memory measured on the CPU, and few layers against all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from apart import apart
from memory_cases import CASES
from memory_traces import trace_layers
from validate_memory import compared

from agentrl.configs.resources_config import TrainerSizes
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import UserError
from agentrl.trainer.metrics.devices import labelled
from agentrl.trainer.planning.step_trace import Machine, trace_step
from agentrl.trainer.planning.workload import Workload

WITHIN = 0.10
SHORT = ["one rank, checkpointing"]


@pytest.mark.long
def test_the_predicted_peak_is_the_measured_one(tmp_path: Path) -> None:
    ratios = compared(SHORT, tmp_path)
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > WITHIN} == {}


@pytest.mark.long
def test_the_predicted_peak_is_the_measured_one_of_every_case(tmp_path: Path) -> None:
    ratios = compared(list(CASES), tmp_path)
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > WITHIN} == {}


@pytest.mark.parametrize(
    ("teacher", "distill"), [("policy", "sampled"), ({"a": "tiny", "b": "x"}, "sampled"), ("tiny", "full")], ids=str
)
def test_teachers_that_cannot_be_traced_are_refused(teacher: Any, distill: str, tmp_path: Path) -> None:
    algorithm = {"distill_coef": 1.0, "distill": distill}
    hint = {"teacher_prompt": "hint"} if teacher == "policy" else {}
    config = TrainerConfig.model_validate({"algorithm": algorithm, "teacher": teacher, **hint})
    work = Workload(tokens=8, prompt=4, group_size=1, groups=1)
    with pytest.raises(UserError, match=r"trainer\.teacher: a plan can have one teacher that is a model"):
        trace_step(tmp_path, config, TrainerSizes(), Machine(labelled("H100-80")), work)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return apart(trace_layers, tmp_path_factory.mktemp("layers"))


@pytest.mark.long
@pytest.mark.parametrize("model", ["dense", "mixture", "mixture, experts"])
def test_few_layers_say_what_all_layers_say(model: str, pairs: dict[str, Any]) -> None:
    whole, guessed = pairs[model]
    for key in ("peak", "held", "resting", "parameters"):
        assert guessed[key] == whole[key]
    for phase, effort in whole["efforts"].items():
        for key, value in effort.items():
            assert guessed["efforts"][phase][key] == pytest.approx(value, rel=1e-9), (phase, key)


@pytest.mark.long
def test_ranks_that_share_experts_hold_a_part_and_exchange_tokens(pairs: dict[str, Any]) -> None:
    alone, shared = (pairs[model][0] for model in ("mixture", "mixture, experts"))
    assert shared["peak"] < alone["peak"]
    exchanged = [key for effort in shared["efforts"].values() for key in effort if key.startswith("all_to_all of t")]
    assert exchanged
    assert not [key for effort in alone["efforts"].values() for key in effort if key.startswith("all_to_all")]
