"""What is stored of an answer: a bounded text, equal for equal answers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.answer_text import LONGEST, bounded


@pytest.mark.parametrize(
    ("answer", "stored"),
    [(None, None), ("", None), (" \n ", None), (" a\n\tb ", "a b"), (4, "4"), (0.5, "0.5"), ("a\0b", "a b")],
)
def test_it_is_the_text_with_single_spaces(answer: str | float | None, stored: str | None) -> None:
    assert bounded(answer) == stored


def test_long_answers_differ_if_their_ends_do() -> None:
    one, other = bounded("x" * 10_000 + "1"), bounded("x" * 10_000 + "2")
    assert one != other
    assert max(len(one or ""), len(other or "")) <= LONGEST
    assert bounded("x" * LONGEST) == "x" * LONGEST


@given(st.text(max_size=2000))
def test_it_is_bounded_and_stays_as_it_is(text: str) -> None:
    found = bounded(text)
    assert found is None or (len(found) <= LONGEST and bounded(found) == found and found.encode())
