"""The learning curve, as `curve.png` and as text."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.domain.schemas import Json

ENDS = ("low", "high")


def save_png(path: Path, title: str, rewards: Sequence[float], evaluations: Sequence[Json]) -> None:
    """Plot the mean reward per step, and each complete evaluation of `summary.json` with its interval."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=3, label="training")
    complete = [evaluation for evaluation in evaluations if evaluation["complete"]]
    for name in sorted({name for evaluation in complete for name in evaluation["settings"]}):
        points = [(one["step"], one["settings"][name]) for one in complete if name in one["settings"]]
        points = [(step, found) for step, found in points if found["reward"] is not None]
        steps, means = [step for step, _ in points], [found["reward"] for _, found in points]
        arms = [
            [0.0 if found[end] is None else abs(found["reward"] - found[end]) for _, found in points] for end in ENDS
        ]
        axes.errorbar(steps, means, yerr=arms, linestyle="--", marker="D", capsize=3, label=f"held out, {name}")
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    staging = path.with_suffix(".tmp.png")
    figure.savefig(staging)
    os.replace(staging, path)


def as_text(rewards: Sequence[float]) -> str:
    """Draw the mean reward per step as text."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(70, 14)
    figure.draw(figure.signal(list(range(1, len(rewards) + 1)), list(rewards), marker="braille").lines())
    figure.label("step")
    figure.title("mean reward")
    return str(plotext.uncolorize(figure.build()))
