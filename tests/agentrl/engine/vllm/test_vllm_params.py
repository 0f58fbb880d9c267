"""SGLang's words for sampling parameters, in vLLM's: none is dropped in silence."""

from __future__ import annotations

import pytest

from agentrl.domain.schemas import Json
from agentrl.engine.sampling_params import GRAMMARS, MAX_SEED, MAX_TOP_K, NUMBERS, SWITCHES
from agentrl.engine.vllm.vllm_params import has_grammar, is_restricted, translated
from agentrl.errors import EngineRejected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_new_tokens": 5, "ignore_eos": True}, {"max_tokens": 5, "ignore_eos": True}),
        ({"temperature": 0.7, "top_p": 0.9, "min_p": None}, {"temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 20}, {"top_k": 20}),
        ({"sampling_seed": 7}, {"seed": 7}),
        ({"sampling_seed": -1}, {"seed": MAX_SEED}),
        ({"json_schema": "{}"}, {"structured_outputs": {"json": "{}"}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"stop": []}, {"stop": [], "skip_special_tokens": False}),
        ({"skip_special_tokens": False, "no_stop_trim": True}, {}),
    ],
)
def test_a_parameter_has_its_counterpart(params: Json, expected: Json) -> None:
    assert translated(params) == {"logprobs": 0, "detokenize": False} | expected


def test_stop_strings_need_the_text() -> None:
    found = translated({"stop": ["\n\n"], "stop_token_ids": [2]})
    assert (found["detokenize"], found["stop"], found["stop_token_ids"]) == (True, ["\n\n"], [2])


def test_one_more_of_the_likeliest_tokens_is_asked_for() -> None:
    assert translated({}, 3)["logprobs"] == 4


def test_every_parameter_that_may_be_sent_is_known() -> None:
    for name in (*NUMBERS, *SWITCHES, *GRAMMARS, "logit_bias", "stop", "stop_token_ids"):
        translated({name: [] if name in ("stop", "stop_token_ids") else 1})
    with pytest.raises(EngineRejected, match="no parameter typo"):
        translated({"typo": 1})


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    with pytest.raises(EngineRejected, match=r"vLLM samples at 0\.01 or above"):
        translated({"temperature": 0.005})


def test_what_restricts_the_distribution() -> None:
    assert not is_restricted({"top_p": 1.0, "top_k": -1, "min_p": 0, "temperature": 0.5})
    assert not is_restricted({"top_k": MAX_TOP_K, "top_p": None})
    assert all(is_restricted(one) for one in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 1e-9}))
    assert has_grammar({"regex": "a"})
    assert not has_grammar({"regex": None})
