"""Reasoning and Hermes calls: token-aware, the same for every split, never a crash, nothing lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.rendering import ContentDelta, Delta, ParsedOutput, ReasoningDelta
from agentrl.rendering.parsing.markup import MarkupParser
from agentrl.rendering.parsing.output_formats import CALL, END_CALL, END_THINK, HERMES, THINK
from agentrl.rendering.renderer import gather

from ..conftest import CHATML_TOKENS, byte_tokenizer, patient, tool

MARKERS = [THINK, END_THINK, CALL, END_CALL]
AS_TOKENS = byte_tokenizer(*CHATML_TOKENS, markers=tuple(MARKERS))
AS_TEXT = byte_tokenizer(*CHATML_TOKENS)
STOP = "<|im_end|>"
TOOL = tool("f", a="string")


def parse(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None, *, in_reasoning: bool = False
) -> tuple[ParsedOutput, list[Delta]]:
    parser = MarkupParser(tokenizer, encode(tokenizer, STOP), HERMES, [TOOL], in_reasoning=in_reasoning)
    bounds = [0, *sorted(cut for cut in cuts or [] if cut < len(ids)), len(ids)]
    deltas = [delta for a, b in pairwise(bounds) for delta in parser.push(ids[a:b])]
    parsed = parser.finish()
    return parsed, deltas + parsed.deltas


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def shown(parsed: ParsedOutput) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    return parsed.content, parsed.reasoning, [(call.name, call.arguments) for call in parsed.tool_calls]


F = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
F_CALL = ("f", '{"a": "é"}')


@pytest.mark.parametrize("tokenizer", [AS_TOKENS, AS_TEXT], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", None, [])),
        (" hello \n", (" hello \n", None, [])),
        ("<think>\nhm\n</think>\n\nhello", ("hello", "hm", [])),
        ("\n<think>\n\n</think>\n\nhello", ("hello", None, [])),
        (F, (None, None, [F_CALL])),
        (f"Let me look.\n{F}\n{F}", ("Let me look.", None, [F_CALL, F_CALL])),
        (f"<think>a\n\nb</think>\n{F}", (None, "a\n\nb", [F_CALL])),
        ("<think>never closed", (None, "never closed", [])),
        ('<tool_call>{"name": "f", "arguments"', ('<tool_call>{"name": "f", "arguments"', None, [])),
        ("a <tool_call>[1]</tool_call> b", ("a <tool_call>[1]</tool_call> b", None, [])),
        (
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        ),
        ('<tool_call>{"name": "f"}</tool_call>', (None, None, [("f", "{}")])),
        ("a </think> b <think> c </tool_call>", ("a </think> b <think> c </tool_call>", None, [])),
        ("1 < 2 <thin", ("1 < 2 <thin", None, [])),
    ],
)
def test_an_output_is_read(tokenizer: Tokenizer, text: str, expected: tuple[object, object, object]) -> None:
    assert shown(parse(tokenizer, encode(tokenizer, text))[0]) == expected


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    parsed, deltas = parse(AS_TOKENS, encode(AS_TOKENS, "hm\n</think>\n\nyes"), in_reasoning=True)
    assert shown(parsed) == ("yes", "hm", [])
    assert [type(delta) for delta in deltas] == [ReasoningDelta, ContentDelta]


def test_a_marker_spelled_by_other_tokens_is_text() -> None:
    spelled = [token for char in F for token in encode(AS_TOKENS, char)]
    assert shown(parse(AS_TOKENS, spelled)[0]) == (F, None, [])


def test_content_streams_and_only_a_possible_marker_waits() -> None:
    parser = MarkupParser(AS_TEXT, encode(AS_TEXT, STOP), HERMES, [TOOL])
    assert parser.push(encode(AS_TEXT, "one <tool")) == [ContentDelta("one")]
    assert parser.push(encode(AS_TEXT, "s>")) == [ContentDelta(" <tools>")]


pieces = st.one_of(
    st.sampled_from([*MARKERS, F, "<think>", " ", "\n\n", "é", "<", "<tool_", '{"name": "f", "arguments": {}}']),
    st.text(max_size=4),
)
texts = st.lists(pieces, max_size=8).map("".join)


@pytest.mark.parametrize("tokenizer", [AS_TOKENS, AS_TEXT], ids=["tokens", "text"])
@patient
@given(texts, st.lists(st.integers(0, 60)), st.booleans())
def test_streamed_equals_unstreamed_for_every_split(
    tokenizer: Tokenizer, text: str, cuts: list[int], in_reasoning: bool
) -> None:
    ids = encode(tokenizer, text)
    whole, _ = parse(tokenizer, ids, in_reasoning=in_reasoning)
    split, deltas = parse(tokenizer, ids, cuts, in_reasoning=in_reasoning)
    assert shown(split) == shown(whole) == shown(gather(deltas, []))
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.tool_calls)


@pytest.mark.parametrize("tokenizer", [AS_TOKENS, AS_TEXT], ids=["tokens", "text"])
@patient
@given(texts)
def test_parsing_drops_only_whitespace_and_markers(tokenizer: Tokenizer, text: str) -> None:
    parsed, _ = parse(tokenizer, encode(tokenizer, text))

    def letters(found: str) -> str:
        return "".join(found.split())

    calls = "".join(
        f'{CALL}{{"name":"{call.name}","arguments":{call.arguments}}}{END_CALL}' for call in parsed.tool_calls
    )
    kept = sorted(letters((parsed.content or "") + (parsed.reasoning or "") + calls))
    thought = [THINK, END_THINK] if THINK in text else []
    candidates = [sorted(letters(text)), *(sorted(letters(text.replace(THINK, "", 1))),) * bool(thought)]
    candidates += [sorted(letters(text.replace(THINK, "", 1).replace(END_THINK, "", 1)))] * bool(thought)
    assert kept in candidates
