"""What parameters say of an answer: whether it was sampled at all, whether another request may go on with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.configs.run_config import RunConfig
from agentrl.errors import RequestError
from agentrl.proxy.calls.call_settings import forced_sampling
from agentrl.proxy.calls.sampling.engine_params import engine_params, is_greedy, replaced, resumable
from agentrl.proxy.dialects.model_request import ModelRequest


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-7, True), (1e-6, False), (1.0, False)])
def test_temperatures_that_the_engine_treats_as_greedy_are_greedy(temperature, greedy):
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
def test_parameters_that_depend_on_the_whole_answer_cannot_be_resumed(params, may):
    assert resumable(params) is may


def params_of(
    delta_ids: list[int],
    *,
    before: int = 0,
    max_tokens: int | None = None,
    clips: bool = False,
    of_run: bool = False,
    **sampling: Any,
) -> Any:
    """What an engine with 100 tokens and a context of 50 is asked for."""
    renderer = SimpleNamespace(vocab_size=100, max_context=50, stop_token_ids=[2])
    prompt = SimpleNamespace(token_ids=[1] * before + delta_ids, delta_ids=delta_ids, grammar={}, opening=[])
    request = ModelRequest(messages=[], max_tokens=max_tokens, clips=clips, sampling=sampling)
    session = SimpleNamespace(is_eval=True, is_baseline=False, sampling=None)
    settings = SimpleNamespace(sampling={}, clip_max_tokens=of_run)
    context: Any = SimpleNamespace(renderer=renderer, settings=settings)
    return engine_params(context, session, request, prompt, 0)  # type: ignore[arg-type]


def test_the_remaining_context_is_the_token_budget():
    assert params_of([99], before=9)["max_new_tokens"] == 40
    assert params_of([99], before=9, max_tokens=40)["max_new_tokens"] == 40


@pytest.mark.parametrize("who", ["clips", "of_run"])
def test_more_tokens_than_there_is_room_for_may_be_cut_to_the_room(who: str) -> None:
    assert params_of([99], before=9, max_tokens=41, **{who: True})["max_new_tokens"] == 40
    with pytest.raises(RequestError, match="maximum context length is 50 tokens"):
        params_of([99], before=49, max_tokens=1, **{who: True})


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ({"delta_ids": [5, 100]}, "invalid_prompt"),
        ({"delta_ids": [5], "logit_bias": {"100": 1.0}}, "invalid_parameter"),
        ({"delta_ids": [5], "before": 49}, "context_length_exceeded"),
        ({"delta_ids": [5], "before": 9, "max_tokens": 41}, "context_length_exceeded"),
    ],
)
def test_parameters_that_would_kill_an_engine_are_refused(call, code):
    with pytest.raises(RequestError) as caught:
        params_of(**call)
    assert (caught.value.status, caught.value.code) == (400, code)


RUN = {"name": "r", "model": "tiny", "agent": "a:B", "tasks": "t.jsonl", "rollout": {"group_size": 2}}


@pytest.mark.parametrize(
    ("steps", "sampling", "forced"),
    [
        (10, {}, {"temperature": 1.0}),
        (10, {"temperature": 0.5, "max_tokens": 8}, {"temperature": 0.5, "max_tokens": 8}),
        (0, {}, {}),
        (0, {"temperature": 0.5}, {"temperature": 0.5}),
    ],
)
def test_a_run_that_only_records_forces_nothing_by_itself(steps, sampling, forced):
    config = RunConfig.model_validate(RUN | {"steps": steps, "rollout": {"group_size": 2, "sampling": sampling}})
    assert forced_sampling(config) == forced


def test_replaced_parameters_are_recorded_with_the_requested_values():
    params = {"temperature": 1.0, "top_p": 0.5, "max_new_tokens": 8}
    asked = ModelRequest(sampling={"temperature": 0.1, "top_p": 0.5}, max_tokens=9)
    assert replaced(asked, params) == {"temperature": 0.1, "max_new_tokens": 9}
    assert replaced(ModelRequest(sampling={"temperature": 1}), params) == {}
