"""The listings of models, read by both SDKs' own types."""

import json
from datetime import UTC, datetime

import openai.types
import pytest
from anthropic.types import ModelInfo

from agentrl.errors import RequestError
from agentrl.proxy.dialects import of_request
from agentrl.proxy.dialects.model_names import Model, model_body, models_body

MODELS = [
    Model(name="calculator", created=1_760_000_000.7, max_context=4096),
    Model(name="judge", created=1_760_000_001),
]


def test_openai_lists_models():
    body = json.loads(models_body(MODELS, anthropic=False))
    assert body["object"] == "list"
    found = [openai.types.Model.model_validate(model, strict=True) for model in body["data"]]
    assert [(model.id, model.created) for model in found] == [
        ("calculator", 1_760_000_000),
        ("judge", 1_760_000_001),
        ("default", 1_760_000_000),
    ]
    assert [model.get("max_model_len") for model in body["data"]] == [4096, None, 4096]


def test_anthropic_lists_models_on_one_page():
    body = json.loads(models_body(MODELS, anthropic=True))
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "calculator", "default")
    first, second, policy = (ModelInfo.model_validate(model) for model in body["data"])
    assert (first.id, first.display_name, first.max_input_tokens) == ("calculator", "calculator", 4096)
    assert first.created_at == datetime.fromtimestamp(1_760_000_000, UTC)
    assert second.max_input_tokens is None
    assert (policy.id, policy.max_input_tokens) == ("default", 4096)


def test_no_models_is_an_empty_page():
    body = json.loads(models_body([], anthropic=True))
    assert body == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("anthropic", [False, True])
def test_one_model_is_as_the_list_shows_it(anthropic):
    for listed in json.loads(models_body(MODELS, anthropic=anthropic))["data"]:
        assert json.loads(model_body(MODELS, listed["id"], anthropic=anthropic)) == listed


def test_the_policy_is_found_by_an_alias():
    found = json.loads(model_body(MODELS, "claude-opus-9", anthropic=True, aliases=["gpt-*", "claude-*"]))
    assert (found["id"], found["max_input_tokens"]) == ("claude-opus-9", 4096)
    with pytest.raises(RequestError, match="no model 'claude-opus-9'"):
        model_body(MODELS, "claude-opus-9", anthropic=True, aliases=["gpt-*"])


def test_a_policy_that_is_called_default_is_listed_once():
    body = json.loads(models_body([Model(name="default", created=1)], anthropic=False))
    assert [model["id"] for model in body["data"]] == ["default"]


def test_an_unknown_model_is_a_404_that_names_the_nearest():
    with pytest.raises(RequestError, match="did you mean 'calculator'") as caught:
        model_body(MODELS, "calculater", anthropic=True)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "headers", "name"),
    [
        ("/v1/models/x", {}, "openai.chat"),
        ("/v1/models/x", {"anthropic-version": "2023-06-01"}, "anthropic.messages"),
        ("/sessions/s/v1/messages/count_tokens", {}, "anthropic.messages"),
        ("/v1/responses", {"anthropic-version": "2023-06-01"}, "openai.responses"),
    ],
)
def test_an_error_has_the_shape_of_its_route_or_else_of_the_sdk_that_asks(path, headers, name):
    assert of_request(path, headers).name == name
