"""Stacked columns: how a whole is made of parts, at each of many places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, link, picture

WIDTH, HEIGHT, LEFT, BELOW, TOP = 900.0, 200.0, 76.0, 20.0, 8.0
MOST = 120
"""Columns of a picture; more places are joined to means of neighbours."""


@dataclass(frozen=True, slots=True)
class Column:
    """A place: its name, its parts, and where it leads."""

    name: str
    parts: Mapping[str, float]
    href: str


def joined(columns: Sequence[Column], most: int = MOST) -> list[Column]:
    """At most `most` columns: means of neighbouring ones, which lead to the last of them."""
    each = max(1, -(-len(columns) // most))
    out = []
    for first in range(0, len(columns), each):
        some = columns[first : first + each]
        names = dict.fromkeys(name for one in some for name in one.parts)
        parts = {name: sum(one.parts.get(name, 0.0) for one in some) / len(some) for name in names}
        name = some[0].name if len(some) == 1 else f"{some[0].name} to {some[-1].name}"
        out.append(Column(name, parts, some[-1].href))
    return out


def drawn(columns: Sequence[Column], kinds: Mapping[str, str], label: str, said: Callable[[float], str]) -> Markup:
    """The columns, each part in the class that `kinds` gives it; `said` spells a number. Empty without columns."""
    if not columns:
        return Markup()
    most = max(max(sum(one.parts.values()) for one in columns), 1e-12)
    wide = (WIDTH - LEFT) / len(columns)
    out = [*_axis(most, said)]
    for number, one in enumerate(columns):
        y, shapes = HEIGHT, []
        for name, kind in kinds.items():
            high = (HEIGHT - TOP) * one.parts.get(name, 0.0) / most
            if high > 0:
                y -= high
                at = LEFT + number * wide
                shapes.append(
                    element("rect", x=at, y=y, width=max(wide - min(2.0, wide / 4), 0.7), height=high, class_=kind)
                )
        told = ", ".join(f"{name} {said(value)}" for name, value in one.parts.items())
        out.append(link(one.href, *shapes, title=f"{one.name}: {told or 'nothing measured'}"))
    out += [
        element("text", columns[0].name, x=LEFT, y=HEIGHT + 14, class_="axis"),
        element("text", columns[-1].name, x=WIDTH - 4, y=HEIGHT + 14, text_anchor="end", class_="axis"),
    ]
    return picture(WIDTH, HEIGHT + BELOW, label, out)


def _axis(most: float, said: Callable[[float], str]) -> list[Markup]:
    marks = [(most, TOP), (most / 2, (HEIGHT + TOP) / 2), (0.0, HEIGHT)]
    return [
        *(element("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="grid") for _, y in marks),
        *(element("text", said(at), x=LEFT - 6, y=y + 4, text_anchor="end", class_="axis") for at, y in marks),
    ]
