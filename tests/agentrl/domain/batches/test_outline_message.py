"""A message holds a batch's outlines exactly."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.batches.outline import BatchOutline, Outline
from agentrl.domain.batches.outline_message import pack, unpack

names = st.text("0123456789abcdef", min_size=1, max_size=32)


@st.composite
def outlines(draw: st.DrawFn) -> Outline:
    calls = draw(st.integers(1, 4))
    ends = np.cumsum(draw(st.lists(st.integers(0, 9), min_size=2 * calls, max_size=2 * calls)))
    outputs = ends.reshape(-1, 2).astype(np.int32)
    rows = np.array([[i, i % 3, a, b] for i, (a, b) in enumerate(outputs.tolist()) if b > a], np.int32).reshape(-1, 4)
    number = st.floats(allow_nan=False)
    return Outline(
        trajectory_id=draw(names),
        session_id=draw(names),
        episode_id=draw(names),
        group_id=draw(names),
        calls=tuple(draw(st.lists(names, min_size=calls, max_size=calls))),
        prompts=tuple(draw(st.lists(names, min_size=calls, max_size=calls))),
        outputs=outputs,
        temperatures=np.full(calls, draw(st.floats(0, 2, width=32)), np.float32),
        kv_mixed=np.arange(calls) % 2 == 0,
        sampled=rows,
        trained=rows[: draw(st.integers(0, len(rows)))],
        turn_returns=np.array(draw(st.lists(number, min_size=calls, max_size=calls)), np.float64),
        episode_return=draw(number),
        named_returns=draw(st.dictionaries(st.text(max_size=8), st.floats(-1e6, 1e6), max_size=3)),
        wasted_tokens=draw(st.integers(0, 1 << 40)),
        truncated=draw(st.booleans()),
        greedy_return=draw(st.none() | number),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


@given(st.lists(outlines(), max_size=5))
def test_a_message_holds_every_field(found: list[Outline]) -> None:
    batch = BatchOutline(step_id="5" * 32, step=3, version=2, trajectories=found, ages={0: 2, 7: 0})
    again = unpack(pack(batch))
    assert (again.step_id, again.step, again.version, again.ages) == ("5" * 32, 3, 2, {0: 2, 7: 0})
    assert len(again.trajectories) == len(found)
    for before, after in zip(found, again.trajectories, strict=True):
        assert all(same(getattr(before, f.name), getattr(after, f.name)) for f in fields(Outline))


@given(st.lists(outlines(), min_size=3, max_size=3))
def test_a_message_is_no_pickle(found: list[Outline]) -> None:
    batch = BatchOutline(step_id="5", step=3, version=2, trajectories=found, ages={})
    assert len(pack(batch)) < len(pickle.dumps(batch)) + 1000
    assert b"Outline" not in pack(batch)
