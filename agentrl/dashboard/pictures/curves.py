"""Curves of one picture, with the intervals around them where there are some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, link, picture, words

WIDTH, HEIGHT, LEFT, BELOW, TOP = 520.0, 170.0, 44.0, 20.0, 8.0
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve, perhaps with an interval; `href`: where it leads, `said`: its tooltip."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    href: str | None = None
    said: str = ""


def drawn(curves: Mapping[str, Sequence[Point]], label: str) -> Markup:
    """The curves in the colours of `names`, over one pair of axes. Empty without points."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return Markup()
    ends = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    low, high = min(ends), max(ends)
    if high == low:
        low, high = low - 0.5, high + 0.5
    first, last = min(p.x for p in points), max(p.x for p in points)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 6) * (value - first) / max(last - first, 1e-9) if last > first else WIDTH / 2

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP) * (high - value) / (high - low)

    out = [*_axes(low, high, first, last, y)]
    for number, curve in enumerate(curves.values()):
        kind = f"c{number % COLOURS}"
        banded = [p for p in curve if p.low is not None and p.high is not None]
        upper = " ".join(f"{x(p.x):.1f},{y(p.high or 0.0):.1f}" for p in banded)
        lower = " ".join(f"{x(p.x):.1f},{y(p.low or 0.0):.1f}" for p in reversed(banded))
        if len(banded) > 1:
            out.append(element("polygon", points=f"{upper} {lower}", class_=f"interval {kind}"))
        elif banded:
            at = x(banded[0].x)
            ends_of = {"y1": y(banded[0].low or 0.0), "y2": y(banded[0].high or 0.0)}
            out.append(element("line", x1=at, x2=at, **ends_of, class_=f"curve {kind}"))
        out.append(
            element("polyline", points=" ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in curve), class_=f"curve {kind}")
        )
        for p in curve:
            dot = element("circle", element("title", words(p.said)), cx=x(p.x), cy=y(p.y), r=3.0, class_=f"dot {kind}")
            out.append(dot if p.href is None else link(p.href, dot, title=p.said))
    return picture(WIDTH, HEIGHT + BELOW, label, out)


def _axes(low: float, high: float, first: float, last: float, y: object) -> list[Markup]:
    assert callable(y)
    marks = [(high, TOP + 8), ((low + high) / 2, (HEIGHT + TOP) / 2 + 3), (low, HEIGHT)]
    return [
        *(element("line", x1=LEFT, x2=WIDTH, y1=y(at), y2=y(at), class_="grid") for at, _ in marks),
        *(element("text", f"{at:.3g}", x=LEFT - 6, y=place, text_anchor="end", class_="axis") for at, place in marks),
        element("text", f"{first:,.0f}", x=LEFT, y=HEIGHT + 14, class_="axis"),
        element("text", f"{last:,.0f}", x=WIDTH - 6, y=HEIGHT + 14, text_anchor="end", class_="axis"),
    ]
