"""Where the samples went: heights in proportion, each band and reason a link to its rows."""

from __future__ import annotations

import re
from html import unescape
from itertools import pairwise

import pytest

from agentrl.dashboard.page_rendering import query
from agentrl.dashboard.pictures import sankey

HOSTILE = '"><script>x</script>\x1b'


def flow(*bands: tuple[str, str | None, int]) -> dict:
    rows = [{"band": band, "reason": reason, "samples": n, "tokens": 0} for band, reason, n in bands]
    return {"samples": sum(row["samples"] for row in rows), "bands": rows}


FLOW = flow(
    ("trained", None, 500), ("waiting", None, 100), ("open", None, 40), ("stale", "too_old", 150),
    ("stale", "tied", 50), ("rejected", "no_reward", 100), ("without calls", "failed", 60),
)  # fmt: skip


def drawn(of: dict) -> str:
    return str(sankey.drawn(of, lambda band, reason: query("/x", {"band": band, "reason": reason})))


def bars(picture: str, x: float) -> list[tuple[float, float]]:
    """Top and height of the bars in a column, from above."""
    found = re.findall(rf'<rect x="{x:.1f}" y="([\d.]+)" width="{sankey.BAR:.1f}" height="([\d.]+)"', picture)
    return [(float(y), float(height)) for y, height in found]


def test_heights_are_in_proportion_and_sum_to_the_whole() -> None:
    whole, bands, reasons = (bars(drawn(FLOW), x) for x in sankey.COLUMNS)
    assert [height for _, height in whole] == [pytest.approx(sankey.TALL, abs=0.1)]
    assert sum(height for _, height in bands) == pytest.approx(sankey.TALL, abs=0.5)
    by_hand = [500, 100, 40, 200, 100, 60]  # in ORDER; a band is the sum of its reasons
    assert [height for _, height in bands] == pytest.approx([sankey.TALL * n / 1000 for n in by_hand], abs=0.1)
    assert [height for _, height in reasons] == pytest.approx(
        [sankey.TALL * n / 1000 for n in (150, 50, 100, 60)], abs=0.1
    )


def test_bars_of_a_column_do_not_overlap() -> None:
    for x in sankey.COLUMNS:
        column = bars(drawn(FLOW), x)
        assert all(y + height <= below + 0.11 for (y, height), (below, _) in pairwise(column))


def test_ribbons_leave_the_whole_without_gaps() -> None:
    starts = [float(y) for y in re.findall(rf'd="M{sankey.BAR:.1f} ([\d.]+)C', drawn(FLOW))]
    heights = [height for _, height in bars(drawn(FLOW), sankey.COLUMNS[1])]
    assert starts == pytest.approx([sum(heights[:n]) for n in range(len(heights))], abs=0.5)


def test_every_band_and_reason_leads_to_its_rows() -> None:
    links = [unescape(link) for link in re.findall(r'href="([^"]*)"', drawn(FLOW))]
    assert links == [
        "/x?band=trained", "/x?band=waiting", "/x?band=open", "/x?band=stale", "/x?band=stale&reason=too_old",
        "/x?band=stale&reason=tied", "/x?band=rejected", "/x?band=rejected&reason=no_reward",
        "/x?band=without%20calls", "/x?band=without%20calls&reason=failed",
    ]  # fmt: skip


def test_counts_and_shares_are_told() -> None:
    picture = drawn(FLOW)
    assert 'aria-label="Where 1,000 samples went"' in picture
    assert "stale: 200 (20.0%)" in picture
    assert "too_old: 150 (15.0%)" in picture


def test_one_sample_of_many_is_visible() -> None:
    _, bands, _ = (bars(drawn(flow(("trained", None, 10**6), ("open", None, 1))), x) for x in sankey.COLUMNS)
    assert bands[1][1] == sankey.THINNEST


def test_what_an_agent_called_a_reason_is_text() -> None:
    picture = drawn(flow(("rejected", HOSTILE, 1)))
    assert "<script" not in picture
    assert "\x1b" not in picture
    assert "band=rejected&amp;reason=%22%3E%3Cscript%3E" in picture


def test_no_sample_is_no_picture() -> None:
    assert drawn(flow()) == ""
