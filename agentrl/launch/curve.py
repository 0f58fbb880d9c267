"""The learning curve: `curve.png`, and as text."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

Marks = dict[str, tuple[float | None, float | None]]
"""Evaluation setting → mean reward before and after."""


def save_png(path: Path, title: str, rewards: Sequence[float], marks: Marks) -> None:
    """Mean reward per step, with each evaluation as a dashed line from before to after."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=3, label="training")
    for name, (before, after) in marks.items():
        if before is not None and after is not None:
            axes.plot([0, len(rewards)], [before, after], linestyle="--", marker="D", label=f"held out, {name}")
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    staging = path.with_suffix(".tmp.png")
    figure.savefig(staging)
    os.replace(staging, path)


def as_text(rewards: Sequence[float], *, width: int = 70, height: int = 14) -> str:
    """Mean reward per step, drawn with characters."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.draw(figure.signal(list(range(1, len(rewards) + 1)), list(rewards), marker="braille").lines())
    figure.label("step")
    figure.title("mean reward")
    return str(plotext.uncolorize(figure.build()))
