"""Every hand-written family, over a synthetic tokenizer with its special tokens: parses, bridges, openings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from tokenizers import Tokenizer

from agentrl.domain.schemas import ForkReason
from agentrl.errors import ModelFolderError, RequestError
from agentrl.rendering import load_renderer
from agentrl.rendering.encoding.text_decoding import reasoning_tokens
from agentrl.rendering.templates.family_renderer import FamilyRenderer

from .conftest import byte_tokenizer, patient, write_folder
from .family_models import FAMILIES, NO_TEXT_BESIDE_CALLS, ONE_CALL, TOOLS, load_model, reply, sample, special_tokens
from .outputs import check_splits, delivered, follow_up, parse

quick = settings(patient, max_examples=examples(10))

HISTORY: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]

ANY_TURN = {"deepseek-r1"}
"""Drops the reasoning of a turn whatever follows it; the others that drop it do so when a user speaks."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyRenderer:
    return load_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def specials(renderer: FamilyRenderer) -> list[str]:
    return [token.content for token in renderer._tokenizer.get_added_tokens_decoder().values()]


def as_text(renderer: FamilyRenderer, text: str) -> list[int]:
    """The ids of a text in which no special token counts."""
    tokenizer = Tokenizer.from_str(renderer._tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


words = st.sampled_from(["so", " ", "\n\n", "é", "<", "x", "{", '"', "`", "|", "calc", '{"name": "calc"}', "日本"])
values = st.sampled_from(["1 + 2", "é < 3", 'say "hi"', "a\nb", "{}", "1", "日本", "null"])
calls = st.one_of(
    values.map(lambda value: ("calc", {"expression": value})),
    st.tuples(values, st.integers(-9, 9)).map(lambda pair: ("look_up", {"word": pair[0], "n": pair[1]})),
)
replies = st.tuples(
    st.sampled_from(["", "Let me see.", "a < b"]), st.sampled_from(["", "hm", "is 1 < 2?"]), st.lists(calls, max_size=2)
)


def as_message(renderer: FamilyRenderer, drawn: tuple[str, str, list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    content, reasoning, found = drawn
    if renderer.name in ONE_CALL:
        found = found[:1]
    if found and renderer.name in NO_TEXT_BESIDE_CALLS:
        content = ""
    if not content and not found:
        content = "Done."
    return reply(content, reasoning, *((f"functions.{name}:{i}", name, args) for i, (name, args) in enumerate(found)))


@quick
@given(data=st.data())
def test_streamed_equals_unstreamed_for_every_split_of_any_ids(model: FamilyRenderer, data: st.DataObject) -> None:
    prompt = model.render(HISTORY, TOOLS)
    pieces = st.one_of(
        st.sampled_from(specials(model)).map(model._encode),
        words.map(model._encode),
        replies.map(lambda drawn: sample(model, as_message(model, drawn))),
        st.lists(st.integers(0, model.vocab_size - 1), max_size=4),
    )
    ids = [token for piece in data.draw(st.lists(pieces, max_size=6)) for token in piece]
    cuts = data.draw(st.lists(st.integers(0, 80), max_size=8))
    check_splits(model, TOOLS, prompt, ids, cuts)


@quick
@given(drawn=replies)
def test_what_the_family_writes_is_read(
    model: FamilyRenderer, drawn: tuple[str, str, list[tuple[str, dict[str, Any]]]]
) -> None:
    message = as_message(model, drawn)
    written_ids = sample(model, message)
    parsed, _ = parse(model, TOOLS, model.render(HISTORY, TOOLS), written_ids)
    assert (parsed.content or "") == message["content"]
    written = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    assert [(found.name, json.loads(found.arguments)) for found in parsed.tool_calls] == written
    assert bool(reasoning_tokens(written_ids, parsed.reasoning, model.decode)) == bool(parsed.reasoning)
    if model.name.startswith("kimi"):  # its ids are part of the text
        assert [found.id for found in parsed.tool_calls] == [c["id"] for c in message.get("tool_calls", [])]


@quick
@given(turns=st.lists(st.tuples(replies, st.booleans()), min_size=1, max_size=4))
def test_append_only_conversations_fork_only_where_reasoning_is_dropped(
    model: FamilyRenderer, turns: list[tuple[Any, bool]]
) -> None:
    messages, ids = list(HISTORY), model.render(HISTORY, TOOLS)
    drops = model._inner.effective_thinking_retention != "all"
    for i, (drawn, with_reasoning) in enumerate(turns):
        output = sample(model, as_message(model, drawn))
        parsed, _ = parse(model, TOOLS, ids, output)
        ids = ids + output
        messages = [*messages, delivered(parsed, with_reasoning=with_reasoning)]
        after = follow_up(parsed, f"more {i}")
        bridge = model.bridge(ids, after, TOOLS, messages_before=messages)
        messages = [*messages, *after]
        rendered = model.render(messages, TOOLS)
        if bridge.delta_ids is None:
            assert bridge.reason is ForkReason.REASONING_DROPPED
            assert drops
            assert after[0]["role"] == "user" or model.name in ANY_TURN
            ids = rendered
        else:
            assert model.decode(rendered).endswith(model.decode(bridge.delta_ids))
            ids = ids + bridge.delta_ids


@quick
@given(data=st.data())
def test_a_turn_of_anything_bridges_unless_its_reasoning_was_never_closed(
    model: FamilyRenderer, data: st.DataObject
) -> None:
    prompt = model.render(HISTORY, TOOLS)
    marked = [token for token in specials(model) if model._encode(token)[0] not in model.stop_token_ids]
    text = "".join(data.draw(st.lists(st.one_of(words, st.sampled_from(marked)), max_size=6)))
    output = [*model._encode(text), data.draw(st.sampled_from(model.stop_token_ids))]
    parsed, _ = parse(model, TOOLS, prompt, output)
    message = delivered(parsed, with_reasoning=True)
    bridge = model.bridge(prompt + output, follow_up(parsed, "more"), TOOLS, messages_before=[*HISTORY, message])
    if bridge.delta_ids is not None:
        assert "more" in model.decode(bridge.delta_ids)
    else:
        assert bridge.reason in (ForkReason.REASONING_DROPPED, ForkReason.TEMPLATE_REWROTE)
        assert model.reasons or "<think>" in text


def test_what_has_no_end_is_truncated(model: FamilyRenderer) -> None:
    prompt = model.render(HISTORY, TOOLS)
    output = sample(model, reply("Let me see."))[:-1]
    bridge = model.bridge(prompt + output, [{"role": "user", "content": "more"}], TOOLS, messages_before=HISTORY)
    assert bridge.reason is ForkReason.TRUNCATED


def test_a_marker_spelled_as_text_inside_an_argument_is_text(model: FamilyRenderer) -> None:
    prompt = model.render(HISTORY, TOOLS)
    placeholder = model._encode("QQQ")
    written = sample(model, reply("", "", ("functions.calc:0", "calc", {"expression": "a QQQ b"})))
    (start,) = (i for i in range(len(written)) if written[i : i + len(placeholder)] == placeholder)
    for marker in specials(model):
        if '"' in marker:
            continue
        ids = written[:start] + as_text(model, marker) + written[start + len(placeholder) :]
        parsed, _ = parse(model, TOOLS, prompt, ids)
        assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
            ("calc", {"expression": f"a {marker} b"})
        ], marker


def test_a_call_without_tools_is_content(model: FamilyRenderer) -> None:
    ids = sample(model, reply("", "", ("functions.calc:0", "calc", {"expression": "12345"})))
    parsed, _ = parse(model, [], model.render(HISTORY, None), ids)
    assert parsed.tool_calls == []
    assert "12345" in (parsed.content or "")


def test_a_truncated_call_is_content(model: FamilyRenderer) -> None:
    prompt = model.render(HISTORY, TOOLS)
    ids = sample(model, reply("", "", ("functions.calc:0", "calc", {"expression": "12345"})))
    text = model.decode(ids)
    for end in range(1, len(ids)):
        cut = model.decode(ids[:end])
        parsed, _ = parse(model, TOOLS, prompt, ids[:end])
        if "12345" not in cut:
            assert parsed.tool_calls == [], cut
        if not parsed.tool_calls and "123" in cut:
            assert parsed.content is not None
            assert "123" in parsed.content, (cut, text)


@quick
@given(data=st.data())
def test_a_call_with_a_piece_missing_is_a_call_or_content(model: FamilyRenderer, data: st.DataObject) -> None:
    prompt = model.render(HISTORY, TOOLS)
    ids = sample(model, reply("", "", ("functions.calc:0", "calc", {"expression": "12345"})))
    start = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(start, len(ids)))
    parsed, _ = parse(model, TOOLS, prompt, ids[:start] + ids[end:])
    if not parsed.tool_calls and "12345" in model.decode(ids[:start] + ids[end:]):
        assert "12345" in f"{parsed.content}{parsed.reasoning}"


def test_openings_are_read_on_from(model: FamilyRenderer) -> None:
    """Opening and rest are a call; a turn that began with one is bridged like any other."""
    prompt = model.render(HISTORY, TOOLS)
    message = reply("", "", ("functions.calc:0", "calc", {"expression": "1"}))
    after = [{"role": "tool", "tool_call_id": "functions.calc:0", "content": "r"}]
    for name in (None, "calc"):
        opening = model.opening(TOOLS, name)
        written = sample(model, message)
        assert written[: len(opening.ids)] == opening.ids
        parser = model.parser(TOOLS, prompt)
        assert parser.push(opening.ids) == []
        parser.push(written[len(opening.ids) :])
        (found,) = parser.finish().tool_calls
        assert (found.name, json.loads(found.arguments)) == ("calc", {"expression": "1"})
        bridge = model.bridge(prompt + written, after, TOOLS, messages_before=[*HISTORY, message])
        assert bridge.delta_ids is not None or model.name in ANY_TURN


@pytest.mark.parametrize(
    "schema", [{"enum": ["x y"]}, {"$ref": "#/$defs/Word"}, {"type": ["string", "null"]}, {}, None]
)
def test_arguments_need_no_type(model: FamilyRenderer, schema: dict[str, Any] | None) -> None:
    """Schemas of enumerations, references, several types or nothing: the value is the text that it is."""
    properties = {} if schema is None else {"word": schema}
    parameters = {"type": "object", "properties": properties, "$defs": {"Word": {"enum": ["x y"]}}}
    tools = [{"type": "function", "function": {"name": "spell", "parameters": parameters}}]
    ids = sample(model, reply("", "", ("functions.spell:0", "spell", {"word": "x y"})))
    parsed, _ = parse(model, tools, model.render(HISTORY, tools), ids)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("spell", {"word": "x y"})]


def test_results_name_their_tool(model: FamilyRenderer) -> None:
    """OpenAI's tool messages have an id alone; formats that write the name get it from the call."""
    call = reply("", "", ("functions.calc:0", "calc", {"expression": "1"}))
    result = {"role": "tool", "tool_call_id": "functions.calc:0", "content": "r"}
    assert model.render([*HISTORY, call, result], TOOLS) == model.render(
        [*HISTORY, call, result | {"name": "calc"}], TOOLS
    )


def test_what_a_format_has_no_place_for_is_refused(tmp_path: Path) -> None:
    llama = load_model(tmp_path / "llama-3", "llama-3")
    two = reply("", "", ("a", "calc", {"expression": "1"}), ("b", "calc", {"expression": "2"}))
    with pytest.raises(RequestError, match="single tool call") as refused:
        llama.render([*HISTORY, two], TOOLS)
    assert (refused.value.status, refused.value.code) == (400, "invalid_messages")


def test_gpt_oss_without_its_encoding_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: Any) -> None:
        raise RuntimeError("failed to download or load vocab file")

    tokenizer = byte_tokenizer("<|start|>")
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", fails)
    with pytest.raises(ModelFolderError, match="cannot be loaded: failed to download"):
        load_renderer(write_folder(tmp_path, tokenizer, None), "gpt-oss")


def test_every_family_has_special_tokens_of_its_own() -> None:
    assert all(len(special_tokens(name)) > 3 for name in FAMILIES if name != "gpt-oss")
    assert len(FAMILIES) == 28
