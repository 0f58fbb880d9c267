"""Messages → ids, for every renderer: the chat template's ids, options of the format, errors that name their cause."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.rendering.registry import FORMATS

from ..chat_templates import check_prompt
from ..conftest import call
from ..family_models import TOOLS
from .contracted import Contracted
from .drawn_replies import HISTORY, calc
from .registered import RENDERERS, TEMPLATED, TEMPLATED_WITH_TOOLS, params

TALKS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "What is 12 plus 35?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    "white space": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "héllo\n\n"}],
    "empty": [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "\n a "},
        {"role": "user", "content": "日本 12345"},
    ],
}
CALLED = [
    {"role": "user", "content": "wie heißt 日本? <b>&</b>"},
    {"role": "assistant", "content": "", "tool_calls": [call("calc", '{"expression": "é < 1", "b": [1.5, null]}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "47"},
]


def called(contracted: Contracted) -> list[dict[str, Any]]:
    """A conversation with a call and its result."""
    message = calc(contracted, "1")
    return [*HISTORY, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}]


def check_template(contracted: Contracted, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    """The prompt equals what transformers renders, as ids and as text."""
    assert contracted.folder is not None
    breaks = any(message["role"] == "assistant" and message["content"].startswith("\n") for message in messages)
    text_only = breaks and not contracted.joins_breaks
    check_prompt(contracted.renderer, contracted.folder, messages, tools, text_only=text_only)


@pytest.mark.parametrize("messages", TALKS.values(), ids=TALKS)
@pytest.mark.parametrize("contracted", params(TEMPLATED), indirect=True)
def test_a_prompt_equals_the_chat_template(contracted: Contracted, messages: list[dict[str, Any]]) -> None:
    check_template(contracted, messages, None)


@pytest.mark.parametrize("messages", [HISTORY, CALLED], ids=["text", "calls"])
@pytest.mark.parametrize("tools", [None, TOOLS[:1]], ids=["without", "with"])
@pytest.mark.parametrize("contracted", params(TEMPLATED_WITH_TOOLS), indirect=True)
def test_a_prompt_with_tools_equals_the_chat_template(
    contracted: Contracted, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    check_template(contracted, messages, tools)


def test_every_format_that_may_be_named_is_under_contract() -> None:
    assert [name for name in FORMATS if not any(name in key for key in RENDERERS)] == []


def test_a_prompt_is_of_the_vocabulary_and_leaves_its_messages_alone(contracted: Contracted) -> None:
    messages, tools = called(contracted), deepcopy(TOOLS)
    given = deepcopy(messages)
    ids = contracted.renderer.render(messages, tools)
    assert 0 <= min(ids) <= max(ids) < contracted.renderer.vocab_size
    assert (messages, tools) == (given, TOOLS)
    assert contracted.renderer.render(messages, tools) == ids


def test_a_tool_message_needs_no_name(contracted: Contracted) -> None:
    """OpenAI's tool messages have an id alone; formats that write the name get it from the call."""
    *messages, result = called(contracted)
    named = [*messages, result | {"name": "calc"}]
    assert contracted.renderer.render([*messages, result], TOOLS) == contracted.renderer.render(named, TOOLS)


def test_a_raw_prompt_may_spell_special_tokens(contracted: Contracted) -> None:
    stop = contracted.renderer.stop_token_ids[0]
    assert contracted.renderer.encode(f"hi{contracted.renderer.decode([stop])}")[-1] == stop


def test_no_options_change_nothing(contracted: Contracted) -> None:
    renderer = contracted.renderer
    assert renderer.with_options({}).render(HISTORY, TOOLS) == renderer.render(HISTORY, TOOLS)


def test_thinking_can_be_disabled(contracted: Contracted) -> None:
    """By the option that the format names, or because the format has no reasoning; others refuse."""
    renderer = contracted.renderer
    if renderer.thinking_option is None and renderer.reasons:
        with pytest.raises(RequestError, match="enable_thinking"):
            renderer.with_options({"enable_thinking": False})
        return
    quiet = renderer.with_options({renderer.thinking_option or "enable_thinking": False})
    assert quiet.stop_token_ids == renderer.stop_token_ids
    assert quiet.render(HISTORY, TOOLS)


def test_an_unknown_option_is_refused_by_name(contracted: Contracted) -> None:
    with pytest.raises(RequestError, match="has no option 'enable_thinkin'") as refused:
        contracted.renderer.with_options({"enable_thinkin": False})
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
