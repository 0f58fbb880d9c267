"""Curves: points inside the picture, in proportion, with their intervals and links."""

from __future__ import annotations

import re

import pytest

from agentrl.dashboard.pictures import curves
from agentrl.dashboard.pictures.curves import HEIGHT, LEFT, WIDTH, Point


def centres(drawn: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([^"]*)" cy="([^"]*)"', drawn)]


def test_larger_values_are_higher_and_later_ones_to_the_right() -> None:
    (a, b, c) = centres(curves.drawn({"one": [Point(0, 0.0), Point(5, 1.0), Point(10, 0.5)]}, "label"))
    assert a[0] == pytest.approx(LEFT)
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2)
    assert b[1] < c[1] < a[1]
    assert c[1] - b[1] == pytest.approx(a[1] - c[1], abs=0.2)


@pytest.mark.parametrize("points", [[Point(3, 0.5)], [Point(3, 0.5), Point(4, 0.5)], [Point(3, 0.5, 0.5, 0.5)]])
def test_one_point_and_equal_points_are_inside(points: list[Point]) -> None:
    for x, y in centres(curves.drawn({"one": points}, "label")):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_intervals_and_links_are_drawn_and_text_is_inert() -> None:
    points = [Point(n, 0.5, 0.25, 0.75, f"/ui/{n}", "<b>\x1b") for n in range(2)]
    drawn = curves.drawn({"a": points, "b": [Point(0, 0.5)]}, 'label "\u202e')
    assert drawn.count("<polygon") == 1
    assert drawn.count("<polyline") == 2
    assert drawn.count("<a ") == 2
    assert "<b>" not in drawn
    assert "\x1b" not in drawn
    assert "\u202e" not in drawn


def test_no_points_are_no_picture() -> None:
    assert curves.drawn({}, "label") == curves.drawn({"a": []}, "label") == ""
