"""Grammars of forced calls: SGLang's own compiler takes them, the format's calls match, and what matches is a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.grammars import check_structural_tag
from agentrl.rendering.renderer import Opening

from ..conftest import tool
from ..outputs import parse
from ..subjects import SUBJECTS, TOOLS, Call, Subject, load_subject

xgrammar = pytest.importorskip("xgrammar")

MARK = "Qmark"
SHORT = tool("look_up", b="boolean", n="integer", word="string")
NASTY = (
    " a\n",
    "\n",
    "</parameter>",
    "\n</parameter>\n</function>",
    '"',
    "'",
    "\\",
    "é 🙂",
    "}}]",
    "<tool_call>",
    "</invoke>",
)
SPELLS_AS_PYTHON = {"lfm2"}
"""Its template quotes strings as Python does; the grammar has JSON's quotes, which are Python's too."""


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return load_subject(tmp_path_factory.mktemp("subjects") / "model", request.param)


def matcher(subject: Subject, opening: Opening) -> Any:
    """SGLang's matcher of the grammar."""
    tag = opening.grammar["structural_tag"]
    check_structural_tag(tag)
    vocabulary = subject.renderer._tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kind, stops = xgrammar.VocabType.BYTE_LEVEL, subject.renderer.stop_token_ids
    info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=len(tokens), stop_token_ids=stops)
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))


def matches(subject: Subject, opening: Opening, ids: list[int]) -> bool:
    """Whether a whole reply, its stop token included, is what the grammar lets the model sample behind the opening."""
    assert ids[: len(opening.ids)] == opening.ids
    walk = matcher(subject, opening)
    return all(walk.accept_token(token) for token in ids[len(opening.ids) :]) and walk.is_terminated()


CALLS: list[tuple[list[dict[str, Any]], str | None, Call]] = [
    ([TOOLS[0], SHORT], None, ("calc", {"expression": " 1 < 2\n"})),
    ([TOOLS[0], SHORT], None, ("look_up", {"b": True, "n": -3, "word": "w"})),
    ([TOOLS[0], SHORT], "look_up", ("look_up", {"n": 7})),
    ([SHORT], None, ("look_up", {})),
]


@pytest.mark.parametrize(("tools", "name", "call"), CALLS)
def test_a_call_that_the_format_writes_matches(
    subject: Subject, tools: list[dict[str, Any]], name: str | None, call: Call
) -> None:
    opening = subject.renderer.opening(tools, name)
    ids = subject.write(call)
    assert matches(subject, opening, ids) or subject.name in SPELLS_AS_PYTHON
    other = "look_up" if call[0] == "calc" else "calc"
    if name is None and len(tools) > 1:
        assert not matches(subject, subject.renderer.opening(tools, other), ids)
    assert not matcher(subject, opening).accept_token(subject.renderer.stop_token_ids[0])


@pytest.mark.parametrize("nasty", NASTY)
def test_text_that_the_grammar_accepts_is_read_as_a_call(subject: Subject, nasty: str) -> None:
    """Whatever an argument holds: the grammar refuses it, or it is read as a call of the tool."""
    opening = subject.renderer.opening(TOOLS[:1], None)
    ids = subject.write(("calc", {"expression": f"a{MARK}b"}))
    mark = subject.renderer._encode(MARK)
    at = next(i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)
    ids = [*ids[:at], *subject.renderer._encode(nasty), *ids[at + len(mark) :]]
    if not matches(subject, opening, ids):
        return
    parsed, _ = parse(subject.renderer, TOOLS[:1], subject.prompt, ids)
    (found,) = parsed.tool_calls
    assert found.name == "calc"
    assert json.loads(found.arguments).keys() == {"expression"}


def test_required_parameters_must_be_there(subject: Subject) -> None:
    strict = json.loads(json.dumps(SHORT))
    strict["function"]["parameters"]["required"] = ["n"]
    opening = subject.renderer.opening([strict], None)
    assert matches(subject, opening, subject.write(("look_up", {"n": 1})))
    assert not matches(subject, opening, subject.write(("look_up", {})))


def test_gemma_opens_calls_whose_values_it_does_not_write_as_json(tmp_path: Path) -> None:
    gemma = load_subject(tmp_path / "model", "gemma4").renderer
    opening = gemma.opening([tool("f", l="array")], None)
    assert (gemma.decode(opening.ids), opening.grammar) == ("<|tool_call>call:f{", {})
