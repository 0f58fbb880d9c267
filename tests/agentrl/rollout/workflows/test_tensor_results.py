"""Returned tensors against recorded calls: what trains, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.rollout.workflows.session_engine import Sampled
from agentrl.rollout.workflows.tensor_results import trained_ranges


def sampled(name: str, prompt: list[int], output: list[int], version: int = 3) -> Sampled:
    n = len(output)
    return Sampled(call_id=name, prompt=prompt, output=output, logprobs=[-0.5] * n, versions=[version] * n)


FIRST = sampled("first", [1, 2], [3, 4, 5])
SECOND = sampled("second", [1, 2, 3, 4, 5, 9], [6, 7])
CALLS = [FIRST, SECOND]
IDS = [1, 2, 3, 4, 5, 9, 6, 7]
MASK = [0, 0, 1, 1, 1, 0, 1, 1]


def result(**changes: Any) -> dict[str, Any]:
    fields = {"input_ids": IDS, "loss_mask": MASK, "attention_mask": [True] * 8, "rewards": [0.5]} | changes
    return {name: np.array(value) if name == "rewards" else np.array([value]) for name, value in fields.items()}


def test_the_loss_is_mapped_to_ranges_of_calls() -> None:
    assert trained_ranges(result(), CALLS) == ({"first": [(0, 3)], "second": [(0, 2)]}, 0.5)
    assert trained_ranges(result(loss_mask=[0, 0, 1, 0, 1, 0, 0, 0]), CALLS)[0] == {"first": [(0, 1), (2, 3)]}


def test_torch_tensors_padding_and_truncation_are_understood() -> None:
    import torch

    cut = {name: torch.tensor(value) for name, value in result().items()}
    assert trained_ranges({k: v[:, :4] if v.ndim == 2 else v for k, v in cut.items()}, CALLS)[0] == {"first": [(0, 2)]}
    padded = result(input_ids=[*IDS, 0, 0], loss_mask=[*MASK, 0, 0], attention_mask=[True] * 8 + [False] * 2)
    assert trained_ranges(padded, CALLS) == trained_ranges(result(), CALLS)


def test_recorded_logprobs_and_versions_are_accepted() -> None:
    logprobs = [0.0, 0.0, -0.5, -0.5, -0.5, 0.0, -0.5, -0.5]
    versions = [-1, -1, 3, 3, 3, -1, 3, 3]
    assert trained_ranges(result(logprobs=logprobs, versions=versions), CALLS)[1] == 0.5
    with pytest.raises(UserError, match=r"logprobs is -0.1 at token 3, but the engine reported -0.5"):
        trained_ranges(result(logprobs=[0, 0, -0.5, -0.1, -0.5, 0, -0.5, -0.5]), CALLS)
    with pytest.raises(UserError, match=r"versions is 4 at token 7, but the engine reported 3"):
        trained_ranges(result(versions=[-1, -1, 3, 3, 3, -1, 3, 4]), CALLS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [0, 1, 1, 1, 1, 0, 1, 1]}, r"loss_mask is 1 at token 1 \(id 2\), which no call"),
        ({"input_ids": [1, 2, 3, 8, 5, 9, 6, 7]}, r"token 2 \(id 3\)"),
        ({"loss_mask": [0, 0, 1]}, "loss_mask has 3 entries, but input_ids has 8"),
        ({"rewards": [1.0, 2.0]}, "rewards has 2 entries"),
        ({"loss_mask": ["a"] * 8}, "loss_mask holds"),
    ],
)
def test_a_result_that_was_not_sampled_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained_ranges(result(**changes), CALLS)


def test_a_batch_of_sequences_and_a_missing_field_are_refused() -> None:
    with pytest.raises(UserError, match=r"input_ids has shape \(2, 8\).*rollout.group_size"):
        trained_ranges({**result(), "input_ids": np.array([IDS, IDS])}, CALLS)
    with pytest.raises(UserError, match="no 'loss_mask'"):
        trained_ranges({"input_ids": [1], "rewards": 1}, CALLS)


def test_two_equal_answers_to_one_prompt_train_once() -> None:
    again = sampled("again", [1, 2], [3, 4, 5])
    assert trained_ranges(result(), [FIRST, again, SECOND])[0] == {"first": [(0, 3)], "second": [(0, 2)]}


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5), st.data())
def test_any_part_of_an_episode_is_mapped_back(turns: list[tuple[int, int]], data: st.DataObject) -> None:
    ids: list[int] = []
    allowed: list[bool] = []
    calls = []
    for number, (n_new, n_output) in enumerate(turns):
        ids += [100 + number] * n_new
        calls.append(sampled(str(number), list(ids), list(range(n_output))))
        ids += range(n_output)
        allowed += [False] * n_new + [True] * n_output
    mask = [data.draw(st.booleans()) and one for one in allowed]
    ranges, _ = trained_ranges({"input_ids": ids, "loss_mask": mask, "rewards": 0}, calls)
    back = [False] * len(ids)
    for call in calls:
        for start, end in ranges.get(call.call_id, []):
            back[len(call.prompt) + start : len(call.prompt) + end] = [True] * (end - start)
    assert back == mask
