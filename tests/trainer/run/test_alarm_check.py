"""When a rule on metrics is broken."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.configs.trainer_config import AlarmConfig
from agentrl.trainer.run.alarm_check import message, sounds


def alarm(**rule: Any) -> AlarmConfig:
    return AlarmConfig(metric="entropy", **rule)


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ({"below": 0.2, "steps": 2}, [0.5, 0.1, 0.1], True),
        ({"below": 0.2, "steps": 2}, [0.1, 0.1, 0.5], False),
        ({"below": 0.2, "steps": 2}, [0.1, 0.2], False),
        ({"below": 0.2, "steps": 2}, [0.1], False),
        ({"below": 0.2, "steps": 2}, [0.1, None, 0.1], False),
        ({"below": 0.2, "steps": 1}, [None], False),
        ({"above": 3.0, "steps": 3}, [9.0, 3.1, 4.0], True),
        ({"above": 3.0, "steps": 3}, [9.0, 3.0, 4.0], False),
        ({"above": 3.0, "steps": 1}, [], False),
    ],
)
def test_an_alarm_sounds_when_every_step_of_its_window_is_beyond_the_bound(
    rule: dict[str, Any], values: list[float | None], expected: bool
) -> None:
    assert sounds(alarm(**rule), values) is expected


def test_a_bound_may_be_a_factor_of_the_first_steps_value() -> None:
    rule = alarm(below=0.1, of_first=True, steps=1)
    assert sounds(rule, [0.19], first=2.0)
    assert not sounds(rule, [0.21], first=2.0)
    assert not sounds(rule, [0.0], first=None)
    growing = alarm(above=5, of_first=True, steps=1)
    assert sounds(growing, [0.6], first=-0.1)  # the size counts, not the sign
    assert not sounds(growing, [0.4], first=-0.1)


def test_the_message_names_metric_value_and_bound() -> None:
    assert message(alarm(below=0.2), 9, 0.123456) == "alarm at step 9: entropy is 0.1235, below 0.2 for 3 steps"
    relative = alarm(above=2, of_first=True, steps=1)
    assert message(relative, 3, 7.0) == "alarm at step 3: entropy is 7, above 2 of its first value for 1 step"


@pytest.mark.parametrize("bounds", [{}, {"below": 1.0, "above": 2.0}])
def test_an_alarm_has_one_bound(bounds: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="the alarm on entropy needs one of below and above"):
        alarm(**bounds)
