"""When a template leaves out reasoning: a conversation alone, compared with the same and messages behind it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rendering.templates.reasoning_loss import ReasoningLoss

THINK = ("<think>", "</think>")
BLOCK = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)


@pytest.mark.parametrize(
    ("alone", "whole"),
    [
        ("<think>x</think> \n b", "b, c"),
        ("<think>x</think> b", "b"),
        ("<think>x</think>\n\n  b", "  b"),  # the line breaks were the template's, the spaces are the reply's
        ("a<think>x</think> b<think>y</think>c", "abc"),
        ("a<think>x</think> b<think>y</think>c", "a<think>x</think> bc"),
        ("a<think>x</think> b<think>y</think>c", "ab<think>y</think>c"),
        ("</think>a<think>x</think>b", "</think>ab"),
        ("a<think>x</think>b<think>never closed", "ab<think>never closed, c"),
        ("<think>x y</think>b", "<think>x …</think>b"),  # shortened
        ("<think>x\ny</think>b", "<think>x\n…</think>b"),
        ("<think></think>a", "a, b"),
        ("<think>\n\n</think>\n\na", "a, b"),
        ("<think>\n\n</think>\n\na<think>x</think>b", "ab"),
    ],
)
def test_reasoning_is_lost(alone: str, whole: str) -> None:
    assert ReasoningLoss(THINK).between(alone, whole)


@pytest.mark.parametrize(
    ("alone", "whole"),
    [
        ("a", "a, b"),
        ("a", "b"),
        ("<think>x</think>a", "<think>x</think>a, b"),
        ("a<think>never closed", "a"),
        ("a<think>x</think>b<think>never closed", "ab<think>never"),
        ("a<think>x</think>b", "1 ab"),  # more than reasoning was written otherwise
        ("a<think>x</think> b", "ac"),
        ("a <think>x</think>b", "ab"),
        ("a<think>x</think>b", "a"),
        ("a", "<think>x</think>a"),
    ],
)
def test_other_changes_are_no_loss_of_reasoning(alone: str, whole: str) -> None:
    assert not ReasoningLoss(THINK).between(alone, whole)


@given(st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "b"]), max_size=12).map("".join), st.text())
def test_a_text_without_its_reasoning_has_lost_it(text: str, after: str) -> None:
    assert ReasoningLoss(THINK).between(text, BLOCK.sub("", text) + after) == bool(BLOCK.search(text))
    assert not ReasoningLoss(THINK).between(text, text + after)


@pytest.mark.parametrize(
    ("turn", "spoken"),
    [
        ("a ", "a "),
        (" \na", "a"),
        ("\n<think>\n\n</think>\n\n a", "a"),
        ("<think>x</think>a", "<think>x</think>a"),
        ("a<think></think>", "a<think></think>"),
        ("", ""),
    ],
)
def test_empty_reasoning_is_removed_from_a_turn(turn: str, spoken: str) -> None:
    assert ReasoningLoss(THINK).spoken(turn) == spoken


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["<think>", "</think>", "<think>x</think>", "<think> </think> \n"])
def test_comparing_takes_linear_time(unit: str) -> None:
    """A policy that repeats itself must not stop the proxy."""
    text = unit * 100_000
    assert ReasoningLoss(THINK).between(text, "") == bool(BLOCK.fullmatch(unit))
    assert ReasoningLoss(THINK).spoken(text).startswith(unit) or "> <" in unit
