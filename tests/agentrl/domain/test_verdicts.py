"""Which tokens of a call train, by the verdict of its session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.verdicts import EVERYTHING, Verdict, check_ranges

SPANS = [[3, 0, 4], [4, 4, 9]]


def test_without_a_verdict_every_token_trains():
    assert EVERYTHING.count("a", 9) == 9
    assert list(EVERYTHING.within("a", SPANS)) == [(3, 0, 4), (4, 4, 9)]
    assert EVERYTHING.stored() is None
    assert Verdict.of(None) == EVERYTHING


def test_ranges_cut_the_spans_and_leave_out_other_calls():
    verdict = Verdict(ranges={"a": [(1, 2), (3, 6)]})
    assert (verdict.count("a", 9), verdict.count("b", 9)) == (4, 0)
    assert list(verdict.within("a", SPANS)) == [(3, 1, 2), (3, 3, 4), (4, 4, 6)]
    assert list(verdict.within("b", SPANS)) == []


@pytest.mark.parametrize(
    "verdict",
    [Verdict(rejected="too easy"), Verdict(ranges={"a": [(0, 2)]}), Verdict(ranges={}), Verdict(truncated=True)],
)
def test_a_verdict_is_read_as_it_was_stored(verdict):
    assert Verdict.of(verdict.stored()) == verdict


@pytest.mark.parametrize("ranges", [[(0, 0)], [(2, 1)], [(0, 10)], [(0, 4), (3, 5)], [(4, 5), (0, 1)], [(-1, 2)]])
def test_ranges_are_ascending_disjoint_and_inside_the_call(ranges):
    assert check_ranges(ranges, 9) is not None


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_the_parts_of_spans_are_the_tokens_of_the_ranges(tokens, seam):
    ranges = [(n, n + 1) for n in sorted(tokens)]
    assert check_ranges(ranges, 41) is None
    verdict = Verdict(ranges={"a": ranges})
    spans = [(0, 0, seam), (1, seam, 41)]
    parts = list(verdict.within("a", spans))
    assert [n for _, start, end in parts for n in range(start, end)] == sorted(tokens)
    assert all(version == (start >= seam) for version, start, _ in parts)
    assert verdict.count("a", 41) == len(tokens)
