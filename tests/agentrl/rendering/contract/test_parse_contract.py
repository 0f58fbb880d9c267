"""Sampled ids → message, for every renderer: a reply is read as it was written, however its stream is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rendering.encoding.text_decoding import reasoning_tokens

from ..family_models import TOOLS, reply
from ..outputs import check_splits, parse
from .contracted import Contracted
from .drawn_replies import HISTORY, Drawn, as_message, calc, quick, replies, words


def found_calls(contracted: Contracted, ids: list[int], tools: list[Any] | None = None) -> list[tuple[str, Any]]:
    """The tool calls of a reply."""
    prompt = contracted.renderer.render(HISTORY, tools or TOOLS)
    parsed, _ = parse(contracted.renderer, tools or TOOLS, prompt, ids)
    return [(found.name, json.loads(found.arguments)) for found in parsed.tool_calls]


@quick
@given(data=st.data())
def test_any_ids_parse_alike_however_they_are_split(contracted: Contracted, data: st.DataObject) -> None:
    renderer, special = contracted.renderer, contracted.special
    tools = data.draw(st.sampled_from([TOOLS, TOOLS, None]))
    pieces = st.one_of(
        st.sampled_from([*special, *contracted.fragments]).map(contracted.encode),
        st.sampled_from(special).map(contracted.encode_as_text),
        st.one_of(words, st.text(max_size=8)).map(contracted.encode),
        replies.map(lambda drawn: contracted.sample(as_message(contracted, drawn))),
        st.lists(st.integers(0, renderer.vocab_size - 1), max_size=20),
    )
    ids = [token for piece in data.draw(st.lists(pieces, max_size=8)) for token in piece]
    cuts = data.draw(st.lists(st.integers(0, 80), max_size=8))
    check_splits(renderer, tools or [], renderer.render(HISTORY, tools), ids, cuts)


@quick
@given(drawn=replies)
def test_a_reply_is_read_as_it_was_written(contracted: Contracted, drawn: Drawn) -> None:
    renderer, message = contracted.renderer, as_message(contracted, drawn)
    ids = contracted.sample(message)
    parsed, _ = parse(renderer, TOOLS, renderer.render(HISTORY, TOOLS), ids)
    assert (parsed.content or "") == message["content"]
    calls = message.get("tool_calls", [])
    written = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert [(found.name, json.loads(found.arguments)) for found in parsed.tool_calls] == written
    assert bool(reasoning_tokens(ids, parsed.reasoning, renderer.decode)) == bool(parsed.reasoning)
    if contracted.writes_call_ids:
        assert [found.id for found in parsed.tool_calls] == [call["id"] for call in calls]


def test_the_first_stop_token_ends_a_reply(contracted: Contracted) -> None:
    renderer = contracted.renderer
    prompt, written = renderer.render(HISTORY, TOOLS), contracted.sample(reply("Done."))
    assert written[-1] in renderer.stop_token_ids
    assert not set(written[:-1]) & set(renderer.stop_token_ids)
    parsed, _ = parse(renderer, TOOLS, prompt, [*written, *contracted.encode("more"), *written])
    assert parsed.content == "Done."


def test_every_call_has_an_id_of_its_own_or_the_one_that_the_model_wrote(contracted: Contracted) -> None:
    renderer, ids = contracted.renderer, contracted.sample(calc(contracted, "1"))
    prompt = renderer.render(HISTORY, TOOLS)
    assert len({parse(renderer, TOOLS, prompt, ids)[0].tool_calls[0].id for _ in range(50)}) == (
        1 if contracted.writes_call_ids else 50
    )


def test_a_marker_spelled_as_text_in_an_argument_is_text(contracted: Contracted) -> None:
    """Spelled with other ids than the marker's own."""
    before, _, after = contracted.renderer.decode(contracted.sample(calc(contracted, "a QQQ b"))).partition("QQQ")
    for marker in contracted.special:
        if '"' in marker:
            continue
        ids = contracted.encode(before) + contracted.encode_as_text(marker) + contracted.encode(after)
        assert found_calls(contracted, ids) == [("calc", {"expression": f"a {marker} b"})], marker


def test_a_call_without_tools_is_content(contracted: Contracted) -> None:
    ids = contracted.sample(calc(contracted, "12345"))
    parsed, _ = parse(contracted.renderer, [], contracted.renderer.render(HISTORY, None), ids)
    assert parsed.tool_calls == []
    assert "12345" in (parsed.content or "")


def test_a_truncated_call_is_content(contracted: Contracted) -> None:
    renderer, ids = contracted.renderer, contracted.sample(calc(contracted, "12345"))
    prompt = renderer.render(HISTORY, TOOLS)
    for end in range(1, len(ids)):
        cut = renderer.decode(ids[:end])
        parsed, _ = parse(renderer, TOOLS, prompt, ids[:end])
        if "12345" not in cut:
            assert parsed.tool_calls == [], cut
        if not parsed.tool_calls and "123" in cut:
            assert parsed.content is not None
            assert "123" in parsed.content, cut


@quick
@given(data=st.data())
def test_a_call_with_a_piece_missing_is_a_call_or_text(contracted: Contracted, data: st.DataObject) -> None:
    renderer, ids = contracted.renderer, contracted.sample(calc(contracted, "12345"))
    start = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(start, len(ids)))
    left = ids[:start] + ids[end:]
    parsed, _ = parse(renderer, TOOLS, renderer.render(HISTORY, TOOLS), left)
    if not parsed.tool_calls and "12345" in renderer.decode(left):
        assert "12345" in f"{parsed.content}{parsed.reasoning}"


@pytest.mark.parametrize(
    "schema", [{"enum": ["x y"]}, {"$ref": "#/$defs/Word"}, {"type": ["string", "null"]}, {}, None]
)
def test_an_argument_without_a_simple_type_is_its_text(contracted: Contracted, schema: dict[str, Any] | None) -> None:
    """Schemas of enumerations, references, several types or nothing."""
    properties = {} if schema is None else {"word": schema}
    parameters = {"type": "object", "properties": properties, "$defs": {"Word": {"enum": ["x y"]}}}
    tools = [{"type": "function", "function": {"name": "spell", "parameters": parameters}}]
    ids = contracted.sample(
        reply("", "", (contracted.call_ids.format(name="spell", index=0), "spell", {"word": "x y"})), tools
    )
    assert found_calls(contracted, ids, tools) == [("spell", {"word": "x y"})]


def test_a_text_parser_reads_no_markup(contracted: Contracted) -> None:
    renderer, left = contracted.renderer, "calc(1)<tool_call> é"
    special = [token.content for token in contracted.tokenizer.get_added_tokens_decoder().values() if token.special]
    for token in special:
        left = left.replace(token, "")
    before = [token for token in special if contracted.encode(token)[0] not in renderer.stop_token_ids]
    parser = renderer.text_parser()
    parser.push(contracted.encode("".join(before) + "calc(1)<tool_call> é"))
    parser.push([renderer.stop_token_ids[0], *contracted.encode("x")])
    parsed = parser.finish()
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (left, None, [])
