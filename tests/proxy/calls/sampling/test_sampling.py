"""What follows a segment of an answer. Engines that die: test_interrupted_answers.py and test_failover.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.sampling.sample_segment import Sampled, Segment
from agentrl.proxy.calls.sampling.sampling import Next, SampleRequest, next_action

END = 2
GRAMMAR = {"json_schema": "{}"}


@pytest.mark.parametrize(
    ("ids", "ended", "reason", "more", "expected", "finish"),
    [
        ([5, END], True, "stop", {}, Next.FINISH, "stop"),
        ([5, 6, 7], True, "length", {}, Next.FINISH, "length"),
        ([5, END], True, "stop", GRAMMAR, Next.FINISH, "stop"),
        # a publish aborted it, or its engine died
        ([5], True, "abort", {}, Next.CONTINUE, "abort"),
        ([5], False, None, {}, Next.CONTINUE, None),
        ([], False, None, GRAMMAR, Next.CONTINUE, None),
        # a grammar's state is lost with the engine
        ([5], False, None, GRAMMAR, Next.RESAMPLE, None),
        # nothing is left to sample, though the engine did not say so
        ([5, 6, 7], False, None, {}, Next.FINISH, "length"),
        ([5, END], False, None, {}, Next.FINISH, "stop"),
        ([5, END], True, "abort", {}, Next.FINISH, "stop"),
    ],
)
def test_the_end_of_a_segment_decides_the_next_action(
    ids: list[int], ended: bool, reason: str | None, more: Any, expected: Next, finish: str | None
) -> None:
    params = {"max_new_tokens": 3, "stop_token_ids": [END]} | more
    request = SampleRequest(session_id="s", rid="r", prompt_ids=TokenIds([1]), params=params, deadline=0.0)
    sampled = Sampled(output_ids=list(ids), finish_reason=reason)
    segment = Segment(SimpleNamespace(), 0, [], 0, ended=ended)
    assert next_action(request, segment, sampled) is expected
    assert sampled.finish_reason == finish
