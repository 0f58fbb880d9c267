"""A histogram of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from agentrl.dashboard.pictures.shapes import element, picture

WIDTH, HEIGHT, AXIS, BINS = 360.0, 120.0, 18.0, 24


def drawn(values: Sequence[float | None], label: str) -> Markup:
    """The histogram of the finite values among these; empty without any."""
    finite = np.array([value for value in values if value is not None and np.isfinite(value)], dtype=float)
    if not finite.size:
        return Markup()
    low, high = float(finite.min()), float(finite.max())
    if high == low:
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(finite, bins=BINS, range=(low, high))
    wide, most = WIDTH / BINS, int(counts.max())
    bars = [
        element(
            "rect",
            element("title", f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {count}"),
            x=i * wide + 0.5,
            y=HEIGHT - HEIGHT * count / most,
            width=wide - 1,
            height=HEIGHT * count / most,
            class_="bar",
        )
        for i, count in enumerate(counts.tolist())
        if count
    ]
    marks = [
        element("text", f"{at:.4g}", x=place, y=HEIGHT + 14, text_anchor=anchor, class_="axis")
        for at, place, anchor in ((low, 0.0, "start"), ((low + high) / 2, WIDTH / 2, "middle"), (high, WIDTH, "end"))
    ]
    told = f"{label}: {finite.size} values from {finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}"
    return picture(WIDTH, HEIGHT + AXIS, told, [*bars, *marks])
