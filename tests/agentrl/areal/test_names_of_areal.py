"""AReaL's names, as workflows import them: each is found, and the small ones do what AReaL's do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import agentrl.areal
from agentrl.areal import import_from_string
from agentrl.areal.hf_tokenizers import apply_chat_template, load_hf_tokenizer
from agentrl.errors import UserError
from agentrl.rollout.verifiers.math_answer import MathAnswer
from agentrl.rollout.workflows.session_engine import SessionEngine


@pytest.mark.parametrize("name", agentrl.areal.__all__)
def test_every_name_is_found(name: str) -> None:
    assert getattr(agentrl.areal, name) is not None


def test_the_names_are_those_of_the_table() -> None:
    assert set(agentrl.areal.__all__) == set(agentrl.areal.MODULES)
    assert agentrl.areal.logging is logging
    assert agentrl.areal.InferenceEngine is SessionEngine


@pytest.mark.parametrize(
    ("name", "hint"), [("stat_tracker", "; did you mean 'stats_tracker'?"), ("__wrapped__", ""), ("_private", "")]
)
def test_an_unknown_name_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as unknown:
        getattr(agentrl.areal, name)
    assert str(unknown.value) == f"module 'agentrl.areal' has no attribute {name!r}{hint}"


@pytest.mark.parametrize("path", ["agentrl.errors.UserError", "agentrl.errors:UserError"])
def test_an_object_is_imported_by_its_path(path: str) -> None:
    assert import_from_string(path) is UserError


@pytest.mark.parametrize("path", ["agentrl.errors.UserErrr", "agentrl.errrors.UserError", "UserError", ""])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="import_from_string"):
        import_from_string(path)


def test_a_tokenizer_pads_with_its_end_token_and_renders_as_the_model_does(tiny_model: Path) -> None:
    tokenizer = load_hf_tokenizer(str(tiny_model))
    assert tokenizer.pad_token_id is not None
    assert load_hf_tokenizer(str(tiny_model)) is tokenizer
    messages = [{"role": "user", "content": "hi"}]
    text = apply_chat_template(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    ids = apply_chat_template(tokenizer, messages, add_generation_prompt=True)
    assert text.startswith("<|im_start|>user\nhi")
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(ids) == text
    with pytest.raises(UserError, match="/no/such/model"):
        load_hf_tokenizer("/no/such/model")


def test_the_worker_compares_mathematical_answers_once_made() -> None:
    worker = agentrl.areal.get_math_verify_worker()
    assert agentrl.areal.get_math_verify_worker() is worker
    assert [worker.verify(answer, "72") for answer in (r"\boxed{72}", "71")] == [1.0, 0.0]
    assert MathAnswer()(completion="72", ground_truth="72") == worker.verify("72", "72")
