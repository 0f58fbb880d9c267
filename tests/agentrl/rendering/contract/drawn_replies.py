"""Replies as models write them: strategies of Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from thoroughness import examples

from ..conftest import patient
from ..family_models import reply
from .contracted import Contracted

quick = settings(patient, max_examples=examples(10))

HISTORY: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]

words = st.sampled_from(["so", " ", "\n\n", "é", "<", "x", "{", '"', "`", "|", "calc", '{"name": "calc"}', "日本"])
values = st.sampled_from(["1 + 2", "é < 3", 'say "hi"', "a\nb", "{}", "1", "日本", "null"])
calls = st.one_of(
    values.map(lambda value: ("calc", {"expression": value})),
    st.tuples(values, st.integers(-9, 9)).map(lambda pair: ("look_up", {"word": pair[0], "n": pair[1]})),
)
Drawn = tuple[str, str, list[tuple[str, dict[str, Any]]]]
replies: st.SearchStrategy[Drawn] = st.tuples(
    st.sampled_from(["", "Let me see.", "a < b"]), st.sampled_from(["", "hm", "is 1 < 2?"]), st.lists(calls, max_size=2)
)


def as_message(contracted: Contracted, drawn: Drawn) -> dict[str, Any]:
    """The drawn reply as far as the format has room for it."""
    content, reasoning, found = drawn
    if contracted.one_call:
        found = found[:1]
    if found and not contracted.text_beside_calls:
        content = ""
    if not contracted.renderer.reasons or not contracted.reasoning:
        reasoning = ""
    if not content and not found:
        content = "Done."
    ids = (contracted.call_ids.format(name=name, index=i) for i, (name, _) in enumerate(found))
    return reply(content, reasoning, *((id, *call) for id, call in zip(ids, found, strict=True)))


def calc(contracted: Contracted, value: str) -> dict[str, Any]:
    """A reply with one call."""
    return reply("", "", (contracted.call_ids.format(name="calc", index=0), "calc", {"expression": value}))
