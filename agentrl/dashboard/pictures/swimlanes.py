"""Episodes side by side over time: a lane each, a bar for each call, coloured by the weight version that sampled it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, link, picture
from agentrl.domain.schemas import Json

WIDTH, NAME, LANE, AXIS = 760.0, 96.0, 17.0, 22.0
COLOURS = 8
Place = Callable[[float], float]
TICKS = 5


def drawn(lanes: Sequence[Json], now: float, *, until: float | None = None) -> Markup:
    """A picture of sessions (`open_episodes.lanes`), in their order. Open ones reach until `now`."""
    if not lanes:
        return Markup()
    start = min(lane["created_at"] for lane in lanes)
    end = until if until is not None else now
    width = max(end - start, 1e-3)
    room = WIDTH - NAME

    def x(at: float) -> float:
        return float(NAME + room * min(max(at - start, 0.0), width) / width)

    out = [_tick(width, room, k) for k in range(TICKS)]
    for number, lane in enumerate(lanes):
        y = AXIS + number * LANE
        over = lane.get("ended_at") or end
        shapes = [
            element("text", lane["id"][-10:], x=0, y=y + 12, class_="lane-name"),
            _bar(x, lane["created_at"], over, "lane", y=y + 6, height=5),
            *(shape for call in lane["calls"] for shape in _call(call, y, x, end)),
        ]
        told = f"{lane['id'][-10:]} {lane['status']}, {len(lane['calls'])} calls, session {lane['id']}"
        out.append(link(f"/ui/sessions/{lane['id']}", *shapes, title=told))
    return picture(WIDTH, AXIS + len(lanes) * LANE + 4, f"{len(lanes)} episodes over {width:.1f} s", out)


def _call(call: Json, y: float, x: Place, end: float) -> list[Markup]:
    over = call["finished_at"] or end
    first = call["first_token_at"] or over
    waited = _bar(x, call["created_at"], first, "waits", y=y + 4, height=9)
    return [waited, _bar(x, first, over, _kind(call), y=y + 2, height=13)]


def _kind(call: Json) -> str:
    if call["status"] in ("failed", "lost", "aborted"):
        return "failed"
    return "v-none" if call["max_version"] is None else f"v{call['max_version'] % COLOURS}"


def _bar(x: Place, start: float, end: float, kind: str, *, y: float, height: float) -> Markup:
    return element("rect", x=x(start), y=y, width=max(x(end) - x(start), 0.7), height=height, class_=kind)


def _tick(width: float, room: float, number: int) -> Markup:
    at = width * number / (TICKS - 1)
    anchor = "end" if number == TICKS - 1 else "start" if number == 0 else "middle"
    said = f"{at:.0f} s" if width >= 10 else f"{at:.1f} s"
    place = NAME + room * number / (TICKS - 1)
    return element("text", said, x=place, y=12, text_anchor=anchor, class_="axis")
