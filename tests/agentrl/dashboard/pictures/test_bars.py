"""Bars: lengths in proportion to their numbers."""

from __future__ import annotations

import re

from agentrl.dashboard.pictures import bars


def test_bars_are_in_proportion_and_named() -> None:
    drawn = bars.drawn([("a", 2.0), ("<b>\x1b", 1.0), ("none", 0.0)], "Seconds", lambda value: f"{value:g} s")
    wide = [float(one) for one in re.findall(r'<rect[^>]* width="([^"]*)"', drawn)]
    assert abs(wide[0] - 2 * wide[1]) < 0.2
    assert 0 < wide[2] < 1
    assert "2 s" in drawn
    assert "<b>" not in drawn
    assert "\x1b" not in drawn


def test_no_rows_are_no_picture() -> None:
    assert bars.drawn([], "Seconds", str) == ""
