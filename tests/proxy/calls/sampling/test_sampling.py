"""What follows a segment of an answer. Engines that die: test_interrupted_answers.py and test_failover.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.domain.tokens import TokenIds
from agentrl.engine.chunks import Chunk
from agentrl.proxy.calls.sampling import sample_segment
from agentrl.proxy.calls.sampling.sample_segment import Sampled, Segment
from agentrl.proxy.calls.sampling.sampling import Next, SampleRequest, next_action
from agentrl.proxy.engines.engine_state import Engine

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


def chunk(*ids: int, finish_reason: str | None = None) -> Chunk:
    return Chunk(output_ids=list(ids), logprobs=[0.0] * len(ids), finish_reason=finish_reason, version_label=0)


@pytest.mark.parametrize(
    ("n_tokens", "versions", "step_s"),
    [(21, [0], 0.1), (4, [0], None), (21, [0, 1], None)],
    ids=["timed", "too few tokens", "an update in the middle"],
)
def test_an_engine_learns_how_long_its_decode_steps_are(
    monkeypatch: pytest.MonkeyPatch, n_tokens: int, versions: list[int], step_s: float | None
) -> None:
    clock = iter([100.0, 100.0 + 0.1 * (n_tokens - 1)])
    monkeypatch.setattr(sample_segment.time, "monotonic", lambda: next(clock))
    engine = Engine(SimpleNamespace())  # type: ignore[arg-type]
    segment, sampled = Segment(engine, 0, [], 0, versions=set(versions)), Sampled()
    segment.read(chunk(1), sampled)
    segment.read(chunk(*range(n_tokens - 1), finish_reason="stop"), sampled)
    assert engine.step_s == (None if step_s is None else pytest.approx(step_s))


def test_late_decode_steps_weigh_more() -> None:
    engine = Engine(SimpleNamespace())  # type: ignore[arg-type]
    for seconds in (0.1, 0.2, 0.2):
        engine.saw_steps(seconds)
    assert engine.step_s == pytest.approx(0.119)
