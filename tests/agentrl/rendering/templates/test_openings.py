"""Openings of tool calls: the format's own beginning, which the parser reads on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.rendering import Opening, ParsedOutput, Renderer, load_renderer

from ..chat_templates import HERMES
from ..conftest import CHATML_TOKENS, byte_tokenizer, tool, write_folder

CALC = tool("calc", expression="string")
ADD = tool("add", a="integer", b="integer")
HISTORY: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chatml(smollm_folder: Path) -> Renderer:
    return load_renderer(smollm_folder)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    tokenizer = byte_tokenizer(*CHATML_TOKENS, markers=("<tool_call>", "</tool_call>"))
    return load_renderer(write_folder(tmp_path_factory.mktemp("models") / "hermes", tokenizer, HERMES), "template")


def read(renderer: Renderer, tools: list[dict[str, Any]], ids: list[int], rest: str) -> ParsedOutput:
    parser = renderer.parser(tools, renderer.render(HISTORY, tools))
    first = parser.push(ids)
    parser.push(renderer.encode(rest))
    parsed = parser.finish()
    assert not first or parsed.tool_calls
    return parsed


@pytest.mark.parametrize(
    ("tools", "name", "matching"),
    [
        ([CALC, ADD], None, {"calc(1)", "calc((1 + 2) * 3)", 'add({"a": 1, "b": 2})'}),
        ([CALC, ADD], "calc", {"calc(1)", "calc((1 + 2) * 3)"}),
        ([CALC], None, {"calc(1)", "calc((1 + 2) * 3)"}),
        ([CALC, tool("now")], None, {"calc(1)", "calc((1 + 2) * 3)", "now()"}),
    ],
)
def test_the_grammar_of_call_syntax_accepts_calls_only(
    chatml: Renderer, tools: list[dict[str, Any]], name: str | None, matching: set[str]
) -> None:
    opening = chatml.opening(tools, name)
    assert opening.ids == []
    others = {"calc(1", "calc(1) is 1", "calculate(1)", "the sum", "add({1})", "now(1)", ""}
    for text in matching | others | {'add({"a": 1, "b": 2})', "now()"}:
        assert accepts(chatml, opening, text) is (text in matching), text
        if text in matching:
            assert read(chatml, tools, [], text).tool_calls, text


def accepts(renderer: Renderer, opening: Opening, text: str) -> bool:
    """Whether SGLang's grammar lets a reply be that text."""
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = renderer._tokenizer.get_vocab(with_added_tokens=True)  # type: ignore[attr-defined]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kind, stops = xgrammar.VocabType.BYTE_LEVEL, renderer.stop_token_ids
    info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=len(tokens), stop_token_ids=stops)
    tag = opening.grammar["structural_tag"]
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))
    return all(matcher.accept_token(token) for token in [*renderer.encode(text), stops[0]])


def test_a_template_opens_with_its_markup(hermes: Renderer) -> None:
    for opening in (hermes.opening([CALC, ADD], None), hermes.opening([CALC, ADD], "add")):
        assert hermes.decode(opening.ids) == '<tool_call>\n{"name": "'
        (call,) = read(hermes, [CALC, ADD], opening.ids, 'add", "arguments": {"a": 1}}\n</tool_call>').tool_calls
        assert (call.name, call.arguments) == ("add", '{"a": 1}')
        assert accepts(hermes, opening, 'add", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
        assert not accepts(hermes, opening, 'add", "arguments": {"a": "1"}}\n</tool_call>')
    assert not accepts(hermes, opening, 'calc", "arguments": {"expression": "1"}}\n</tool_call>')


def test_a_template_without_readable_calls_opens_none(tmp_path: Path) -> None:
    mute = write_folder(
        tmp_path, byte_tokenizer(*CHATML_TOKENS), "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RequestError) as refused:
        load_renderer(mute, "template").opening([CALC], None)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "tools_unsupported", "tools")


def test_an_opening_is_derived_once_from_the_names_of_the_tools(
    hermes: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = [found | {"function": found["function"] | {"description": "long " * 1000}} for found in (CALC, ADD)]
    first = hermes.opening(described, None)
    assert first == hermes.opening([CALC, ADD], None)

    def never(*_: Any) -> list[int]:
        raise AssertionError("rendered again")

    monkeypatch.setattr(type(hermes), "render", never)
    assert hermes.opening([CALC, ADD], None) == first
    with pytest.raises(AssertionError, match="rendered again"):
        hermes.opening([CALC, tool("another")], None)
