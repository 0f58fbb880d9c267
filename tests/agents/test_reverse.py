"""The reverse agent's rewards and tasks."""

from __future__ import annotations

import pytest

from agentrl.agents.reverse import heldout_tasks, is_held_out, reversal, score, train_tasks


@pytest.mark.parametrize(
    ("answer", "reward"), [("dcba", 1.0), ("dcbx", 0.375), ("abcd", 0.0), ("dc", 0.25), ("dcbaxxxx", 0.25), ("", 0.0)]
)
def test_each_letter_in_its_place_counts(answer: str, reward: float) -> None:
    assert score("abcd", answer) == reward


def test_a_function_scores_the_first_word() -> None:
    assert reversal("dcbx", ["abcd", "efgh"]) == score("abcd", "dcbx") == 0.375


def test_held_out_words_are_never_trained() -> None:
    assert all(is_held_out(word) for task in heldout_tasks() for word in task["words"])
    assert not any(is_held_out(word) for task in train_tasks(seed=5, count=200) for word in task["words"])
