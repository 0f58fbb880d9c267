"""Where the samples went, as a Sankey diagram: sampled → band → reason, heights in proportion to the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, link, picture, words
from agentrl.domain.schemas import Json

WIDTH, BAR, GAP, LINE = 860.0, 12.0, 12.0, 16.0
COLUMNS = (0.0, 250.0, 500.0)
TALL = 190.0
"""Height of all samples together."""
THINNEST = 1.5
LONGEST_REASON = 40
"""Characters of a reason that its label shows."""
ORDER = ("trained", "waiting", "open", "stale", "rejected", "without calls")

Address = Callable[[str, str | None], str]


def drawn(flow: Json, address: Address) -> Markup:
    """The diagram of `sample_flow.of_run`. `address(band, reason)` is where the rows of a band are."""
    total = flow["samples"]
    if not total:
        return Markup()
    y, out = 0.0, []
    filled = 0.0  # of the bar "sampled"
    for band in sorted({one["band"] for one in flow["bands"]}, key=ORDER.index):
        parts = sorted((one for one in flow["bands"] if one["band"] == band), key=lambda one: -one["samples"])
        samples = sum(one["samples"] for one in parts)
        height = _height(samples, total)
        reasons = [one for one in parts if one["reason"] is not None]
        block = max(height, LINE, sum(max(_height(one["samples"], total), LINE) + 3 for one in reasons))
        name = f"{band}: {_count(samples, total)}"
        kind = "band-" + band.replace(" ", "-")
        shapes = [
            _ribbon(COLUMNS[0] + BAR, filled, COLUMNS[1], y, height, kind),
            element("rect", x=COLUMNS[1], y=y, width=BAR, height=height, class_=kind),
            element("text", name, x=COLUMNS[1] + BAR + 6, y=y + min(height, block) / 2 + 4),
        ]
        out.append(link(address(band, None), *shapes, title=name))
        out += _reasons(reasons, total, y, kind, partial(address, band))
        filled += height
        y += block + GAP
    whole = element("rect", x=COLUMNS[0], y=0.0, width=BAR, height=filled, class_="band-sampled")
    label = element("text", f"sampled: {total:,}", x=COLUMNS[0] + BAR + 6, y=filled + 14)
    height = max(y, filled + 22)
    return picture(WIDTH, height, f"Where {total:,} samples went", [whole, *out, label])


def _reasons(
    reasons: Sequence[Json], total: int, y: float, kind: str, address: Callable[[str | None], str]
) -> list[Markup]:
    out, start = [], y
    for one in reasons:
        height = _height(one["samples"], total)
        name = f"{words(one['reason'][:60])}: {_count(one['samples'], total)}"
        shapes = [
            _ribbon(COLUMNS[1] + BAR, start, COLUMNS[2], y, height, kind),
            element("rect", x=COLUMNS[2], y=y, width=BAR, height=height, class_=kind),
            element("text", name, x=COLUMNS[2] + BAR + 6, y=y + height / 2 + 4),
        ]
        out.append(link(address(one["reason"]), *shapes, title=name))
        start += height
        y += max(height, LINE) + 3
    return out


def _ribbon(x: float, y: float, to_x: float, to_y: float, height: float, kind: str) -> Markup:
    bend = (x + to_x) / 2
    upper = f"M{x:.1f} {y:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    lower = f"V{to_y + height:.1f}C{bend:.1f} {to_y + height:.1f} {bend:.1f} {y + height:.1f} {x:.1f} {y + height:.1f}Z"
    return element("path", d=upper + lower, class_=f"ribbon {kind}")


def _height(samples: int, total: int) -> float:
    return max(THINNEST, TALL * samples / total)


def _count(samples: int, total: int) -> str:
    return f"{samples:,} ({samples / total:.1%})"


def _short(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
