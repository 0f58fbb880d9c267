"""No number, string or grammar reaches an engine but within its range."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.sampling_params import NUMBERS, ParamRefused, check

VOCAB = 100
WHOLE = [0, 1, -1, 2**31, 2**31 - 1, -(2**31), 2**63, -(2**63), 2**64, 10**400]
FLOATS = [0.5, 1.0, -0.0, 1e30, -1e30, 1e-30, 5e-324, math.inf, -math.inf, math.nan]
EXTREMES = [*WHOLE, *FLOATS, True, False, "1", "", [], {}]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", EXTREMES, ids=repr)
def test_a_number_is_in_its_range_or_refused(name: str, value: Any) -> None:
    number = NUMBERS[name]
    is_number = isinstance(value, int if number.whole else int | float) and not isinstance(value, bool)
    if is_number and number.low <= value <= number.high and value != number.above:
        assert abs(value) < 2**31 or name == "sampling_seed"
        check({name: value}, VOCAB)
    else:
        with pytest.raises(ParamRefused, match=f"^{name}: must be"):
            check({name: value}, VOCAB)


@given(st.dictionaries(st.sampled_from([*NUMBERS]), st.integers() | st.floats(), min_size=1))
def test_accepted_parameters_fit_the_tensors(params: dict[str, Any]) -> None:
    try:
        check(params, VOCAB)
    except ParamRefused:
        return
    for name, value in params.items():
        assert math.isfinite(value)
        assert abs(value) <= (2**63 - 1 if name == "sampling_seed" else 2**31 - 1)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"top_k": 2**31}, "from -1 to"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "is not a token id"),
        ({"logit_bias": {"\u0663": 1.0}}, "is not a token id"),
        ({"logit_bias": {"100": 1.0}}, "outside the vocabulary of 100"),
        ({"logit_bias": {"5": math.nan}}, "is not from -100 to 100"),
        ({"logit_bias": {f"{i:09d}": 1.0 for i in range(1025)}}, "at most 1024"),
        ({"stop": ["x"] * 33}, "at most 32"),
        ({"stop": ["x" * 1025]}, "at most 1024"),
        ({"stop": [""]}, "empty"),
        ({"stop_token_ids": [100]}, "ids below 100"),
        ({"json_schema": '{"$ref":"#"}'}, "leads back"),
        ({"json_schema": "{}", "regex": "a"}, "one grammar"),
        ({"custom_params": {"a": 1}}, "is not supported by engines"),
        ({"ignore_eos": 1}, "is not supported by engines"),
        ({"n": 2}, "is not supported by engines"),
    ],
)
def test_a_parameter_that_no_engine_takes_is_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ParamRefused, match=said):
        check(params, VOCAB)


def test_valid_parameters_are_accepted() -> None:
    params = {
        "temperature": 1.0,
        "top_p": 1e-9,
        "top_k": 2**30,
        "min_p": 1.0,
        "frequency_penalty": -2.0,
        "presence_penalty": 2,
        "logit_bias": {"99": -100.0},
        "max_new_tokens": 1,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "stop": ["x" * 1024] * 32,
        "sampling_seed": 2**62,
        "json_schema": '{"type":"object"}',
        "regex": None,
    }
    check(params, VOCAB)
