"""`chat_template_kwargs`: bounded, known to the format, honoured in prompts, and part of a conversation's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.rendering import Renderer, load_renderer
from agentrl.rendering.conversation import root_key
from agentrl.rendering.options import check_options, with_thinking

from .conftest import CHATML_TOKENS, byte_tokenizer, write_folder
from .family_models import load_model

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINKING = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if style %}{{ style }}{% endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if thinking is defined and thinking is false %}
</think>

{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    path = tmp_path_factory.mktemp("models") / "model"
    return load_renderer(write_folder(path, byte_tokenizer(*CHATML_TOKENS, markers=MARKERS), THINKING), "template")


def prompt(renderer: Renderer, **options: Any) -> str:
    told = renderer.with_options(options)
    return told.decode(told.render(QUESTION, None))


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_a_template_is_told_not_to_think(template: Renderer, name: str) -> None:
    assert prompt(template).endswith("<think>\n")
    assert prompt(template, **{name: True}) == prompt(template)
    told = template.with_options({name: False})
    assert told is template.with_options({name: False})
    ids = told.render(QUESTION, None)
    assert told.decode(ids).endswith("<think>\n</think>\n\n")
    parser = told.parser(None, ids)
    parser.push(told.encode("Yes."))
    parsed = parser.finish()
    assert (parsed.content, parsed.reasoning) == ("Yes.", None)


def test_a_family_is_told_not_to_think(tmp_path: Path) -> None:
    qwen3 = load_model(tmp_path / "model", "qwen3")
    assert prompt(qwen3, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert not prompt(qwen3).endswith("</think>\n\n")
    with pytest.raises(RequestError, match="takes other values"):
        qwen3.with_options({"enable_thinking": "perhaps"})


def test_turns_with_options_are_bridged(template: Renderer) -> None:
    told = template.with_options({"thinking": False, "style": "brief"})
    ids = told.render(QUESTION, None) + told.encode("Yes.<|im_end|>")
    before, after = [*QUESTION, {"role": "assistant", "content": "Yes."}], [{"role": "user", "content": "more"}]
    whole = told.render([*before, *after], None)
    bridge = told.bridge(ids, after, None, messages_before=before)
    assert bridge.delta_ids is None or told.decode(whole).endswith(told.decode(bridge.delta_ids))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"styl": "x"}, r"has no option 'styl'; did you mean 'style'\? \(it has style, thinking\)"),
        ({"preserve_thinking": True}, "has no option"),
    ],
)
def test_an_unknown_option_is_refused_with_the_known_ones(template: Renderer, options: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        template.with_options(options)
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


def test_a_format_without_thinking_accepts_only_to_disable_it(smollm_folder: Path) -> None:
    chatml = load_renderer(smollm_folder)
    assert chatml.with_options({"enable_thinking": False}) is chatml
    with pytest.raises(RequestError, match=r"has no option 'enable_thinking' \(it has none\)"):
        chatml.with_options({"enable_thinking": True})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"messages": "x"}, "messages: cannot be set"),
        ({"bos_token": "x"}, "bos_token: cannot be set"),
        ({"a": [1]}, "a: must be true, false"),
        ({"a": "x" * 65}, "a: must be true, false"),
        ({"a": "\x1b"}, "a: must be true, false"),
        ({"a": float("inf")}, "a: must be true, false"),
        ({"a": 2**60}, "a: must be true, false"),
        ({"__class__": 1}, "is not an option's name"),
        ({f"o{i}": i for i in range(17)}, "at most 16"),
    ],
)
def test_options_are_bounded(options: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        check_options(options)


def test_the_thinking_option_has_the_formats_own_name(template: Renderer, smollm_folder: Path, tmp_path: Path) -> None:
    assert template.thinking_option == "thinking"
    assert load_model(tmp_path / "model", "qwen3").thinking_option == "enable_thinking"
    assert load_renderer(smollm_folder).thinking_option is None


@pytest.mark.parametrize(
    ("said", "thinks", "option", "told"),
    [
        ({}, False, "thinking", {"thinking": False}),
        ({"style": "x"}, True, "enable_thinking", {"style": "x", "enable_thinking": True}),
        ({}, None, "thinking", {}),
        ({}, False, None, {}),
        ({"thinking": True}, False, "thinking", {"thinking": True}),
        ({"enable_thinking": True}, False, "thinking", {"enable_thinking": True}),
    ],
)
def test_an_explicit_option_wins(said: Any, thinks: bool | None, option: str | None, told: Any) -> None:
    assert with_thinking(said, thinks, option) == told


def test_null_is_absent_and_options_are_part_of_the_key() -> None:
    assert check_options({"thinking": None}) == check_options(None) == {}
    assert root_key(None, check_options({"thinking": False})) != root_key(None, {})
