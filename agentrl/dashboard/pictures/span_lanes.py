"""What ran at the same time as what: a lane for each part of a run, a bar for each span of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, picture
from agentrl.domain.schemas import Json

WIDTH, NAME, LANE, AXIS, TICKS = 900.0, 96.0, 26.0, 22.0, 5


def drawn(spans: Sequence[Json], lanes: Sequence[str], kinds: Mapping[str, tuple[str, str]], label: str) -> Markup:
    """The spans (`lane`, `kind`, `start`, `end`, perhaps `step`) by lane; `kinds` gives words and a class for a kind.

    Empty without spans.
    """
    if not spans:
        return Markup()
    start, end = min(one["start"] for one in spans), max(one["end"] for one in spans)
    width, room = max(end - start, 1e-3), WIDTH - NAME
    out = [_tick(width, room, number) for number in range(TICKS)]
    for number, lane in enumerate(lanes):
        y = AXIS + number * LANE
        out.append(element("text", lane, x=0, y=y + 16, class_="lane-name"))
        out.append(element("line", x1=NAME, x2=WIDTH, y1=y + LANE - 2, y2=y + LANE - 2, class_="grid"))
        for one in (span for span in spans if span["lane"] == lane and span["kind"] in kinds):
            words, kind = kinds[one["kind"]]
            x = NAME + room * (one["start"] - start) / width
            wide = max(room * (one["end"] - one["start"]) / width, 0.7)
            step = f" of step {one['step']}" if "step" in one else ""
            said = element("title", f"{words}{step}: {one['end'] - one['start']:.2f} s")
            out.append(element("rect", said, x=x, y=y + 4, width=wide, height=LANE - 9, class_=kind))
    return picture(WIDTH, AXIS + len(lanes) * LANE + 4, label, out)


def _tick(width: float, room: float, number: int) -> Markup:
    at = width * number / (TICKS - 1)
    anchor = "end" if number == TICKS - 1 else "start" if number == 0 else "middle"
    place = NAME + room * number / (TICKS - 1)
    said = f"{at:.0f} s" if width >= 10 else f"{at:.1f} s"
    return element("text", said, x=place, y=12, text_anchor=anchor, class_="axis")
