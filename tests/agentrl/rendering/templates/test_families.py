"""Families of the `renderers` package: their selection, their streams, and bridges with checked prefixes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentrl.domain.schemas import ForkReason
from agentrl.errors import ModelFolderError
from agentrl.rendering import ContentDelta, Delta, ParsedOutput, ReasoningDelta, Renderer, load_renderer
from agentrl.rendering.templates.family_renderer import FamilyRenderer
from agentrl.rendering.templates.model_folder import ModelFolder

from .. import outputs
from ..conftest import CHATML_TOKENS, byte_tokenizer, call, published_template, tool, write_folder
from ..family_models import load_model
from ..outputs import shown

CALC = tool("calc", expression="string")
HISTORY: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
SPECIAL = (*CHATML_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOKENIZER = byte_tokenizer(*SPECIAL, markers=MARKERS)


def folder(path: Path, template: str, **config: Any) -> Path:
    """A model folder with a published chat template."""
    return write_folder(path, TOKENIZER, published_template(template), **config)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def qwen36(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Its prompts open the reasoning, its calls are XML."""
    return load_renderer(folder(tmp_path_factory.mktemp("models"), "qwen3_6", model_type="qwen3_5"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load_renderer(folder(tmp_path_factory.mktemp("models"), "qwen3", model_type="qwen3"))


def test_all_candidates_share_one_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 150,000 tokens takes a second to load, and five families are tried for Qwen3."""
    loaded: list[Path] = []
    load = ModelFolder.tokenizer

    def noted(folder: ModelFolder) -> Tokenizer:
        loaded.append(folder.path)
        return load(folder)

    monkeypatch.setattr(ModelFolder, "tokenizer", noted)
    assert load_renderer(folder(tmp_path, "qwen3", model_type="qwen3")).name == "qwen3"
    assert loaded == [tmp_path]


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        ("qwen3", "qwen3", "qwen3"),
        ("qwen3", "qwen3_moe", "qwen3"),
        ("qwen3_6", "qwen3_5_moe", "qwen3.6"),
        ("qwen3_instruct_2507", "qwen3", "qwen3-vl"),  # no reasoning: the chat format of the vision models
        ("qwen2_5", "qwen2", "template"),
        ("qwen3", "llama", "template"),
    ],
)
def test_the_family_is_the_one_that_reproduces_the_template(
    tmp_path: Path, template: str, model_type: str, name: str
) -> None:
    assert load_renderer(folder(tmp_path, template, model_type=model_type)).name == name


def test_a_family_can_be_named(tmp_path: Path) -> None:
    path = folder(tmp_path, "qwen3_instruct_2507", model_type="qwen3")
    assert load_renderer(path, "qwen3").name == "qwen3"
    (path / "renderer.json").write_text(json.dumps({"renderer": "qwen3"}))
    assert load_renderer(path).name == "qwen3"
    with pytest.raises(ModelFolderError, match=r"unknown renderer 'qwen33'; did you mean 'qwen3'\?"):
        load_renderer(path, "qwen33")
    with pytest.raises(ModelFolderError, match="needs special tokens"):
        load_renderer(path, "llama-3")


def parse(renderer: Renderer, ids: list[int], cuts: Sequence[int] = ()) -> tuple[ParsedOutput, list[Delta]]:
    return outputs.parse(renderer, [CALC], renderer.render(HISTORY, [CALC]), ids, cuts)


REPLY = "<think>\nhm\n</think>\n\nLet me see.\n"
REPLY += '<tool_call>\n{"name": "calc", "arguments": {"expression": "é"}}\n</tool_call>'


def test_an_output_is_read(qwen3: Renderer) -> None:
    parsed, _ = parse(qwen3, encode(REPLY + "<|im_end|>"))
    assert shown(parsed) == ("Let me see.", "hm", [("calc", '{"expression": "é"}')])
    assert shown(parse(qwen3, encode("plain\n\n"))[0]) == ("plain", None, [])
    assert shown(parse(qwen3, [])[0]) == ("", None, [])


def test_malformed_calls_are_content(qwen3: Renderer) -> None:
    for broken in ('{"name": "calc"', "[1, 2]", '{"name": 3, "arguments": {}}', "[" * 5000):
        parsed, _ = parse(qwen3, encode(f"so\n<tool_call>\n{broken}\n</tool_call><|im_end|>"))
        assert parsed.tool_calls == []
        assert parsed.content is not None
        assert parsed.content.startswith("so")
        assert broken in parsed.content


def test_plain_text_streams(qwen3: Renderer) -> None:
    parser = qwen3.parser([CALC], qwen3.render(HISTORY, [CALC]))
    assert parser.push(encode("one two ")) == [ContentDelta("one two")]
    assert parser.push(encode("three")) == [ContentDelta(" three")]
    assert parser.push(encode(" a < b")) == [ContentDelta(" a < b")]
    assert parser.finish().deltas == []


def test_reasoning_streams_then_content(qwen3: Renderer, qwen36: Renderer) -> None:
    for renderer, opening in ((qwen3, "<think>\n"), (qwen36, "")):
        parser = renderer.parser([CALC], renderer.render(HISTORY, [CALC]))
        assert parser.push(encode(opening + "is 1 < 2? ")) == [ReasoningDelta("is 1 < 2?")]
        assert parser.push(encode("yes\n")) == [ReasoningDelta(" yes")]
        assert parser.push(encode("</think>\n\nYes.\n")) == [ContentDelta("Yes.")]
        assert parser.push(encode("<tool_call>\nbroken")) == []
        parsed = parser.finish()
        assert (parsed.reasoning, parsed.tool_calls) == ("is 1 < 2? yes", [])
        assert parsed.content is not None
        assert parsed.content.startswith("Yes.\n")
        assert parsed.content.endswith("broken")


def test_a_tool_result_is_bridged_and_a_question_forks(qwen3: Renderer) -> None:
    prompt = qwen3.render(HISTORY, [CALC])
    previous = prompt + encode(REPLY + "<|im_end|>")
    result = {"role": "tool", "tool_call_id": "x", "content": "47"}
    bridge = qwen3.bridge(previous, [result], [CALC])
    assert bridge.delta_ids is not None
    assert qwen3.decode(bridge.delta_ids) == (
        "\n<|im_start|>user\n<tool_response>\n47\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    calls = [call("calc", '{"expression": "é"}', "x")]
    reply = {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": calls}
    assert previous + bridge.delta_ids == qwen3.render([*HISTORY, reply, result], [CALC])
    # A new question makes the family drop the reasoning of earlier turns.
    question = {"role": "user", "content": "and?"}
    assert qwen3.bridge(previous, [question], [CALC]).reason is ForkReason.TEMPLATE_REWROTE


def test_a_turn_without_a_bridge_has_its_reason(qwen3: Renderer) -> None:
    prompt = qwen3.render(HISTORY, None)
    user = {"role": "user", "content": "and?"}
    assert qwen3.bridge([*prompt, *encode("hm")], [user], None).reason is ForkReason.TRUNCATED
    invented = {"role": "assistant", "content": "never sampled"}
    ended = [*prompt, *encode("hm<|im_end|>")]
    assert qwen3.bridge(ended, [invented, user], None).reason is ForkReason.HISTORY_EDITED


class Declines:
    """A family of the library that extends no turn."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None


def test_without_a_bridge_of_the_library_the_text_after_the_reply_is_the_bridge(
    qwen3: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("_inner", "_keeping"):
        monkeypatch.setattr(qwen3, part, Declines(getattr(qwen3, part)))
    prompt = qwen3.render(HISTORY, [CALC])
    reply = {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
        "tool_calls": [call("calc", '{"expression": "é"}', "x")],
    }
    result, question = {"role": "tool", "tool_call_id": "x", "content": "47"}, {"role": "user", "content": "and?"}
    written = prompt + encode(REPLY + "<|im_end|>")
    otherwise = prompt + encode("<think>hm</think>Let me see." + REPLY.partition("see.")[2] + "<|im_end|>")
    delta = "\n<|im_start|>user\n<tool_response>\n47\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    for previous in (written, otherwise):
        bridge = qwen3.bridge(previous, [result], [CALC], messages_before=[*HISTORY, reply])
        assert bridge.delta_ids is not None
        assert qwen3.decode(bridge.delta_ids) == delta
        forked = qwen3.bridge(previous, [question], [CALC], messages_before=[*HISTORY, reply])
        assert forked.reason is ForkReason.TEMPLATE_REWROTE  # it drops the reasoning of earlier turns
    assert qwen3.bridge(otherwise, [result], [CALC]).reason is ForkReason.TEMPLATE_REWROTE


def test_without_a_bridge_of_the_library_a_reply_without_a_written_end_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM's replies end where the next message begins, with a token that stands before earlier messages too."""
    glm = load_model(tmp_path, "glm-4.5")
    for part in ("_inner", "_keeping"):
        monkeypatch.setattr(glm, part, Declines(getattr(glm, part)))
    reply, question = {"role": "assistant", "content": "Let me see."}, {"role": "user", "content": "and?"}
    previous = [*glm.render(HISTORY, [CALC]), *glm.encode("Let me see!<|user|>")]
    assert previous[-1] in glm.stop_token_ids
    forked = glm.bridge(previous, [question], [CALC], messages_before=[*HISTORY, reply])
    assert (forked.delta_ids, forked.reason) == (None, ForkReason.TEMPLATE_REWROTE)


def test_the_library_knows_the_tools_of_the_turn(tmp_path: Path) -> None:
    """Hunyuan keeps earlier reasoning where there are tools, and drops it where there are none."""
    hunyuan = load_model(tmp_path, "hy3")
    question = {"role": "user", "content": "and?"}
    for tools in ([CALC], [], None):
        previous = hunyuan.render(HISTORY, tools) + hunyuan.encode("Let me see.<｜hy_eos:opensource｜>")
        bridge = hunyuan.bridge(previous, [question], tools)
        assert (bridge.delta_ids is not None) == bool(tools)


def result(id: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "1", **more}


def asks(*calls: tuple[str, str]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(name, "{}", id) for name, id in calls]}


@pytest.mark.parametrize(
    ("before", "messages", "expected"),
    [
        ([asks(("a", "1")), asks(("b", "2"))], [result("2"), result("1")], ["b", "a"]),
        ([asks(("a", "1"))], [result("9"), result("1", name="own")], ["tool", "own"]),
        ([asks(("a", "1"), ("b", "1"))], [result("1")], ["a"]),  # one id twice: the first
        ([asks(("a", "1"))], [result("1"), asks(("b", "1")), result("1")], ["a", None, "b"]),  # the last call before
        ([asks(("a", "1"))], [asks(("b", "2")), result("2"), result("1")], [None, "b", "a"]),
        (
            [],
            [asks(("a", "1")), asks(("b", "2")), result("1"), {"role": "user", "content": "x"}],
            [None, None, "a", None],
        ),
    ],
)
def test_a_tools_result_has_the_name_of_the_tool_that_was_called(
    qwen3: Renderer, before: list[Any], messages: list[Any], expected: list[str | None]
) -> None:
    assert isinstance(qwen3, FamilyRenderer)
    assert [message.get("name") for message in qwen3._plain(messages, before)] == expected


def test_the_last_turn_is_what_follows_the_last_generation_prompt(qwen3: Renderer) -> None:
    assert isinstance(qwen3, FamilyRenderer)
    asked = encode("<|im_start|>assistant\n")
    prompt, output = qwen3.render(HISTORY, None), encode("Let me see.<|im_end|>")
    assert qwen3._last_turn(prompt + output) == (asked, output)
    assert qwen3._last_turn(asked + output) == (asked, output)
    assert qwen3._last_turn(prompt + output + prompt + output[1:]) == (asked, output[1:])
    assert qwen3._last_turn(output) == (output[:1], output[1:])
