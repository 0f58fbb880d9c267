"""Prompts by a model folder's chat template, and the folders and requests that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ModelFolderError, RequestError
from agentrl.rendering import load_renderer

from ..chat_templates import (
    FORGETFUL,
    OPENED,
    PLAIN,
    check_prompt,
)
from ..conftest import CHATML_TOKENS, byte_tokenizer, call, published_template, write_folder
from .template_conversations import CALC, HISTORY, load, parse

CONVERSATIONS: list[list[dict[str, Any]]] = [
    HISTORY,
    [
        {"role": "user", "content": "wie heißt 日本? <b>&</b>"},
        {"role": "assistant", "content": "", "tool_calls": [call("calc", '{"expression": "é < 1", "b": [1.5, null]}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "47"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["text", "tools"])
def test_a_template_without_tools_is_rendered_as_transformers_does(
    tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    """The contract of renderers says the same of templates with tools."""
    check_prompt(load(tmp_path, published_template("lfm2")), tmp_path / "model", messages, None)


def test_tools_that_could_not_be_read_are_refused(tmp_path: Path) -> None:
    renderer = load(tmp_path, FORGETFUL)
    with pytest.raises(RequestError) as refused:
        renderer.render(HISTORY, [CALC])
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "tools", "tools_unsupported")


def test_a_template_that_refuses_messages_is_a_400(tmp_path: Path) -> None:
    renderer = load(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        renderer.render(HISTORY, None)
    assert refused.value.status == 400


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    renderer = load(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError):
        renderer.render(HISTORY, None)


def test_a_folder_without_anything_to_render_with_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bare", byte_tokenizer(), None)
    with pytest.raises(ModelFolderError, match="no chat template"):
        load_renderer(folder)
    with pytest.raises(ModelFolderError, match=r"no tokenizer\.json"):
        load_renderer(tmp_path)


UNREAD = PLAIN.replace("<tool_call>{{ call.function | tojson }}</tool_call>", "!{{ call.function.name }}!")


def test_a_template_whose_calls_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    telling = UNREAD.replace("{{ '' }}", "{{ tools | tojson }}")
    path = write_folder(tmp_path / "model", byte_tokenizer(*CHATML_TOKENS), telling, model_type="muse")
    with pytest.raises(ModelFolderError, match=r"the chat template of muse .* cannot be read exactly; to serve it"):
        load_renderer(path)
    (path / "renderer.json").write_text('{"renderer": "template"}')
    with pytest.raises(RequestError, match="no tool calls that can be parsed"):
        load_renderer(path).render(HISTORY, [CALC])


def test_the_template_of_gpt_oss_is_read_as_harmony(tmp_path: Path) -> None:
    markers = tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call"))
    path = write_folder(
        tmp_path / "model", byte_tokenizer(*markers), published_template("gptoss"), model_type="gpt_oss"
    )
    eos = [byte_tokenizer(*markers).token_to_id(token) for token in ("<|return|>", "<|call|>")]
    (path / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    renderer = load_renderer(path)
    calc = {"type": "function", "function": CALC["function"] | {"description": "Calculates."}}
    prompt = renderer.render(HISTORY, [calc])
    sampled = renderer.encode(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.calc "
        '<|constrain|>json<|message|>{"expression": " 1"}<|call|>'
    )
    parsed = parse(renderer, prompt, sampled)
    (found,) = parsed.tool_calls
    assert (renderer.name, parsed.reasoning, found.arguments) == ("template", "hm", '{"expression": " 1"}')
    reply = {"role": "assistant", "content": None, "tool_calls": [call("calc", found.arguments, found.id)]}
    result = {"role": "tool", "tool_call_id": found.id, "content": "1"}
    bridge = renderer.bridge(prompt + sampled, [result], [calc], messages_before=[*HISTORY, reply])
    assert bridge.delta_ids is not None
    assert renderer.decode(bridge.delta_ids).endswith("<|start|>assistant")


@pytest.mark.parametrize(("tools", "expected"), [(None, ""), ([CALC], "<think>")])
def test_the_generation_prompt_is_what_a_template_adds_to_a_conversation(
    tmp_path: Path, tools: list[Any] | None, expected: str
) -> None:
    renderer = load(tmp_path, OPENED)
    head = renderer.decode(renderer.render(HISTORY, tools))
    assert renderer._generation_prompt_of(head, HISTORY, tools) == "<|im_start|>assistant\n" + expected
