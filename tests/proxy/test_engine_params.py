"""What parameters say of an answer: whether it was sampled at all, whether another request may go on with it."""

from __future__ import annotations

import pytest

from agentrl.proxy.engine_params import is_greedy, resumable


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-7, True), (1e-6, False), (1.0, False)])
def test_what_the_engine_takes_for_greedy_is_greedy(temperature, greedy):
    assert is_greedy({"temperature": temperature}) is greedy


@pytest.mark.parametrize(
    ("params", "may"),
    [
        ({"temperature": 0.0, "logit_bias": {"5": 1.0}, "presence_penalty": 0.0}, True),
        ({"sampling_seed": 0}, False),
        ({"sampling_seed": 3}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"regex": "a"}, False),
    ],
)
def test_what_remembers_the_beginning_of_an_answer_cannot_be_resumed(params, may):
    assert resumable(params) is may
