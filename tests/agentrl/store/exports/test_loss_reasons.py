"""Each reason why a token is not in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.domain.verdicts import Verdict
from agentrl.store.db import codec
from agentrl.store.exports.loss_reasons import otherwise, spans
from agentrl.store.training.returns import SessionReturns

CREDITED = SessionReturns("e", 1.0, {"first": 1.0, "second": 1.0}, rewarded=True)


def turn(name: str, prompt: int, output: int, roles: tuple[str, ...] = ("user",), **changed: Any) -> Any:
    """A call with so many prompt tokens of its own and sampled tokens, by version 3."""
    return SimpleNamespace(
        **{
            "id": name,
            "owned": True,
            "trainable": True,
            "output_tokens": output,
            "new_messages": codec.pack_json([{"role": role} for role in roles]),
            "prompt_delta_ids": codec.pack_ids([0] * prompt),
            "spans": [[3, 0, output]],
        }
        | changed
    )


def found(*turns: Any, verdict: Verdict | None = None, rest: Any = "trained") -> Sequence[tuple[str, int, int]]:
    return spans(turns, CREDITED, verdict or Verdict(), {3}, rest)


def test_prompts_and_outputs_alternate() -> None:
    turns = turn("first", 4, 2), turn("second", 3, 5, roles=("tool", "tool"))
    assert found(*turns) == [("prompt", 0, 4), ("trained", 4, 6), ("tool", 6, 9), ("trained", 9, 14)]


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (("tool",), "tool"),
        (("user",), "message"),
        (("tool", "user"), "message"),
        (("assistant", "user"), "not sampled"),
    ],
)
def test_a_later_prompt_is_named_by_its_messages(roles: tuple[str, ...], reason: str) -> None:
    assert found(turn("first", 1, 1), turn("second", 2, 1, roles=roles))[2] == (reason, 2, 4)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"owned": False}, "shared"),
        ({"trainable": False}, "distribution"),
        ({"id": "side"}, "side call"),
        ({"spans": [[2, 0, 2]]}, "stale"),
    ],
)
def test_an_output_that_does_not_train(changed: dict[str, Any], reason: str) -> None:
    assert found(turn("first", 1, 2, **changed)) == [("prompt", 0, 1), (reason, 1, 3)]


def test_parts_of_an_output_are_stale_or_left_out_by_the_agent() -> None:
    verdict = Verdict(ranges={"first": [(1, 3), (4, 6)]})
    output = turn("first", 1, 8, spans=[[2, 0, 2], [3, 2, 8]])
    assert found(output, verdict=verdict) == [
        ("prompt", 0, 1),
        ("left out", 1, 2),
        ("stale", 2, 3),
        ("trained", 3, 4),
        ("left out", 4, 5),
        ("trained", 5, 7),
        ("left out", 7, 9),
    ]


@pytest.mark.parametrize(
    ("state", "why", "reason"),
    [
        ("stale", "tied", "tied"),
        ("stale", "too_old", "stale"),
        ("rejected", "no_reward", "rejected"),
        ("trained", None, "trained"),
        ("ready", None, "trained"),
    ],
)
def test_a_trajectory_that_does_not_train_is_the_reason_of_its_other_tokens(
    state: str, why: str | None, reason: str
) -> None:
    rest = otherwise(SimpleNamespace(state=state, reason=why))
    assert found(turn("first", 1, 2), rest=rest)[1] == (reason, 1, 3)
