"""The experts of a call over segments that die, are aborted or retracted: every position has the origin it deserves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.experts.routed_experts import CallRouting, RouteOrigin, RoutingShape
from agentrl.engine.chunks import Chunk
from agentrl.errors import EngineError
from agentrl.proxy.calls.sampling.routed_rows import RoutedRows
from agentrl.testing.fake_routing import as_reported, chosen_experts

SHAPE = RoutingShape(layers=2, top_k=3, experts=11)
SEGMENTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=5),  # a chunk with one token each: whether a retraction came before it
        st.booleans(),  # whether the engine lives to report the experts
        st.integers(0, 6),  # positions that its cache had
    ),
    min_size=1,
    max_size=4,
)


def rows_of(first: int, last: int, salt: int) -> str:
    """What an engine reports for positions first … last - 1."""
    return as_reported(chosen_experts(range(first, last), [salt] * (last - first), SHAPE, first))


def chunk(tokens: int = 1, **more) -> Chunk:
    return Chunk(output_ids=[5] * tokens, logprobs=[-1.0] * tokens, **more)


@given(st.integers(0, 5), st.integers(1, 4), SEGMENTS, st.integers(0, 9))
def test_every_position_is_accounted_for(start, own, segments, cut) -> None:
    prompt = start + own
    rows, tokens, passes, salts = RoutedRows(SHAPE, start, prompt), 0, Counter[int](), dict[int, int]()
    for salt, (chunks, reports, cached) in enumerate(segments):
        begun, retractions = tokens, 0
        rows.begin(tokens)
        for at, retracted in enumerate(chunks):
            end = prompt + tokens  # sampling a token computes all positions before it
            if at == 0:
                passes.update(range(0 if begun else cached, end))
            elif retracted:
                retractions += 1
                passes.update(range(end))
            else:
                passes[end - 1] += 1
            tokens += 1
            last = at == len(chunks) - 1 and reports
            experts = rows_of(rows.end, end, salt) if last else None
            if last:
                salts |= dict.fromkeys(range(rows.end, end), salt)
            reason = "abort" if last else None
            rows.read(
                chunk(cached_tokens=cached, retractions=retractions, routed_experts=experts, finish_reason=reason),
                tokens,
            )
    kept = max(tokens - cut, 0)
    found = rows.finished(kept)
    positions = range(start, prompt + kept - 1)
    assert (found.start, len(found.experts)) == (start, len(positions))
    for place, position in enumerate(positions):
        origin = RouteOrigin(found.experts.origins[place])
        assert (origin == RouteOrigin.MISSING) == (position not in salts)
        if origin == RouteOrigin.RECORDED:  # no other pass chose for it
            assert passes[position] <= 1
        if position in salts:
            expected = chosen_experts([position], [salts[position]], SHAPE, position)
            np.testing.assert_array_equal(found.experts.ids[place], np.sort(expected[0], 1))
    assert 0 <= found.computed_from <= start
    assert all(passes[position] == 0 for position in range(found.computed_from))


def test_one_quiet_pass_records_all_of_its_positions() -> None:
    rows = RoutedRows(SHAPE, 3, 7)
    rows.begin(0)
    rows.read(chunk(cached_tokens=4), 1)
    rows.read(chunk(2, routed_experts=rows_of(3, 9, 0), finish_reason="stop"), 3)
    found = rows.finished(3)
    assert found.computed_from == 3
    assert found.experts.counts()[RouteOrigin.RECORDED] == 7 + 3 - 1 - 3


def test_an_aborted_segment_s_rows_stay_and_the_next_one_reports_the_rest() -> None:
    rows = RoutedRows(SHAPE, 0, 4)
    rows.begin(0)
    rows.read(chunk(2, routed_experts=rows_of(0, 5, 0), finish_reason="abort"), 2)
    assert rows.end == 5
    rows.begin(2)
    rows.read(chunk(2, routed_experts=rows_of(5, 7, 1), finish_reason="stop"), 4)
    found = rows.finished(4).experts
    assert found.origins.tolist() == [RouteOrigin.RECOMPUTED] * 5 + [RouteOrigin.RECORDED] * 2
    np.testing.assert_array_equal(found.ids[:5], np.sort(chosen_experts(range(5), [0] * 5, SHAPE), 2))


def test_an_engine_that_reports_none_leaves_all_missing() -> None:
    rows = RoutedRows(SHAPE, 0, 4)
    rows.begin(0)
    rows.read(chunk(3, finish_reason="stop"), 3)
    assert rows.finished(3).experts.counts()[RouteOrigin.MISSING] == 6


def recorded(rows: RoutedRows, last: Chunk) -> CallRouting:
    rows.read(last, 3)
    return rows.finished(3)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_rows_of_another_shape_are_refused(reason) -> None:
    for sent in (rows_of(0, 5, 0), rows_of(0, 7, 0), "no base64", as_reported(np.full((6, 2, 3), 11)), "*" * 192):
        rows = RoutedRows(SHAPE, 0, 4)
        rows.begin(0)
        with pytest.raises(EngineError, match="experts"):
            recorded(rows, chunk(3, routed_experts=sent, finish_reason=reason))
