"""Exact and fuzzy comparison, and multiple choice."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.rollout.verifiers.text_match import choice, exact, fuzzy


@pytest.mark.parametrize(
    ("completion", "truth", "options", "value"),
    [
        ("  Paris. ", "paris", {}, 1.0),
        ("ＰＡＲＩＳ", "Paris", {}, 1.0),
        ("Lyon", "Paris", {}, 0.0),
        ("NYC", ["New York", "NYC"], {}, 1.0),
        ("Paris.", "paris", {"normalize": False}, 0.0),
        ("7", 7, {"normalize": False}, 1.0),
        ("so it is 3 #### 4\n#### 5", 5, {"pattern": r"#### (.*)"}, 1.0),
        ("no mark", 5, {"pattern": r"#### (.*)"}, 0.0),
    ],
)
def test_exact(completion: str, truth: Any, options: dict[str, Any], value: float) -> None:
    assert exact(completion, truth, **options) == value


def test_fuzzy_is_a_similarity_with_a_threshold() -> None:
    assert fuzzy("The Beatles", "the beatles") == 1.0
    assert 0.7 < fuzzy("Beatles", ["The Beatles", "x"]) < 1.0
    assert fuzzy("Beatles", "The Beatles", threshold=0.9) == 0.0
    assert fuzzy("x" * 10**6, "x" * 10**6) == 1.0


@pytest.mark.parametrize(
    ("completion", "truth", "value"),
    [
        ("The answer is B.", "B", 1.0),
        ("A is wrong. So the answer is (C)", 2, 1.0),
        (r"Therefore \boxed{\text{D}}", "D", 1.0),
        ("First (A), no: (B)", "A", 0.0),
        ("b", "B", 1.0),
        ("B)", "(B)", 1.0),
        ("Because of this", "B", 0.0),
        ("A dog is an animal", "A", 0.0),
    ],
)
def test_choice(completion: str, truth: Any, value: float) -> None:
    assert choice(completion, truth) == value


def test_the_answer_is_what_was_compared() -> None:
    assert (
        exact("So: The Moon.", ["moon", "the moon"], pattern="So: (.*)").answer == "moon"
    )  # all right answers are one
    assert exact("So: Mars.", "moon", pattern="So: (.*)").answer == "mars"
    assert exact("Mars", "moon", pattern="So: (.*)").answer is None
    assert exact(" A ", "B", normalize=False).answer == " A "
    assert fuzzy("The Mon.", "the moon").answer == "the mon"
    assert choice("I take (b).", "A").answer == "B"
    assert choice("none", "A").answer is None
