"""Readers of tool calls: their cost grows linearly with the length of a call."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from agentrl.rendering.parsing.alphabet import Alphabet
from agentrl.rendering.parsing.call_readers import CallReader, Found
from agentrl.rendering.parsing.output_formats import DEEPSEEK, HY3, LFM, PAIRS, Format
from agentrl.rendering.parsing.typed_values import Parameters

from ..conftest import byte_tokenizer, tool

MANY = 100_000
"""So often a policy repeats itself: who reads each repetition to the end meets the suite's own limit."""
PARAMETERS = Parameters([tool("f", k="string")])


def reader_of(format: Format, *, tokens: bool = True) -> tuple[CallReader, Alphabet]:
    markers = (*format.markers, *format.atoms)
    tokenizer: Tokenizer = byte_tokenizer(markers=markers if tokens else ())
    alphabet = Alphabet(tokenizer, markers)
    return format.reader(alphabet), alphabet


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize(
    ("format", "head", "unit"),
    [
        (PAIRS, "f<arg_key>", "</arg_key><arg_value>"),
        (PAIRS, "f<arg_key>", "</arg_key><arg_value></arg_value>x"),
        (HY3, "f<arg_key:opensource>", "</arg_key:opensource><arg_value:opensource>"),
        (DEEPSEEK, "", " "),
        (DEEPSEEK, "", "\n"),
    ],
    ids=["pairs", "broken pairs", "hy3", "spaces", "lines"],
)
def test_a_body_that_repeats_itself_is_read_once(format: Format, head: str, unit: str, tokens: bool) -> None:
    reader, alphabet = reader_of(format, tokens=tokens)
    assert reader.read(alphabet.marked(head + unit * MANY + "x"), PARAMETERS) is None


def test_pairs_may_hold_the_markers_of_pairs() -> None:
    reader, alphabet = reader_of(PAIRS)
    value = "</arg_value><arg_key>b</arg_key> <arg_value"
    body = alphabet.marked("f<arg_key>k</arg_key><arg_value>") + value + alphabet.marked("</arg_value>")
    assert reader.read(body, PARAMETERS) == [Found("f", f'{{"k": "{value}"}}')]


def test_the_name_of_a_call_may_stand_behind_white_space() -> None:
    reader, alphabet = reader_of(DEEPSEEK)
    assert reader.read(alphabet.marked(" \n f <｜tool▁sep｜>{}"), PARAMETERS) == [Found("f", "{}")]


@pytest.mark.parametrize(
    ("body", "goes_on"),
    [
        ('[f(k="a', True),
        ('[f(k=\'a "b" ', True),
        (r'[f(k="a\"', True),
        ('[f(k="a")]', False),
        ('[f(k="a"', False),
        ("", False),
        ("x", False),
        ('[f(k="a\n', False),
    ],
)
def test_a_marker_stands_in_a_value_of_python_only_within_a_string(body: str, goes_on: bool) -> None:
    """Text that is not yet a call is not parsed again at every marker."""
    reader, _ = reader_of(LFM)
    assert reader.goes_on(body) is goes_on
