"""Named numbers as horizontal bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, picture, words

WIDTH, NAME, LINE = 420.0, 130.0, 20.0
SAID = 80.0
"""Room for the numbers at the right."""


def drawn(rows: Sequence[tuple[str, float]], label: str, said: Callable[[float], str]) -> Markup:
    """A bar for each (name, number from 0); `said` spells a number. Empty without rows."""
    if not rows:
        return Markup()
    most = max(max(value for _, value in rows), 1e-12)
    room = WIDTH - NAME - SAID
    out = []
    for line, (name, value) in enumerate(rows):
        y, wide = line * LINE, room * max(value, 0.0) / most
        out += [
            element("text", words(name[:24]), x=NAME - 6, y=y + 14, text_anchor="end"),
            element("rect", x=NAME, y=y + 4, width=max(wide, 0.7), height=LINE - 7, class_="bar"),
            element("text", said(value), x=NAME + wide + 6, y=y + 14, class_="axis"),
        ]
    told = f"{label}: {', '.join(f'{words(name)} {said(value)}' for name, value in rows)}"
    return picture(WIDTH, len(rows) * LINE + 2, told, out)
