"""Whole training runs on the real engine, one for each seed: how much does the held-out reward rise?

    python benchmarks/learning.py agents/counting.yaml --seeds 0 1 2 --out benchmarks/results/learning-counting.json

Each run is `agentrl train CONFIG seed=N` in a folder of its own. The held-out tasks are sampled at the run's
temperature before the first step and after the last; the gain has a 95 % interval over tasks. Beside the JSON file a
picture shows the training reward of each step. Exit status 1: a gain's interval contains 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Report
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.configs.config_files import load_config

SETTING = "sampled"
"""The evaluation at the run's own temperature."""


def main() -> None:
    """Train once for each seed, and write what was learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value, e.g. steps=8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each (default 0 1 2)")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here; a run that ended is not repeated")
    parser.add_argument("--out", type=Path, help="write the result here as JSON, and the curves as PNG")
    options = parser.parse_args()
    name = load_config(options.config, options.overrides).name
    with tempfile.TemporaryDirectory(prefix="agentrl-learning-") as folder:
        runs = {
            seed: trained(options.config, options.overrides, name, seed, (options.keep or Path(folder)) / str(seed))
            for seed in options.seeds
        }
    report = Report(f"learning: {name}", notes={"overrides": options.overrides, "runs": runs})
    add_figures(report, runs)
    report.show()
    if options.out:
        report.write(options.out)
        draw(options.out.with_suffix(".png"), name, runs)
    if any(run["gains"][SETTING]["low"] <= 0 for run in runs.values()):
        raise SystemExit(1)


def trained(config: Path, overrides: Sequence[str], name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The summary of a run with this seed, which runs now unless the folder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "runs" / name / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "agentrl", "train", str(config.resolve()), *overrides, f"seed={seed}"]
        subprocess.run(command, cwd=folder, check=True)
    run: dict[str, Any] = json.loads(summary.read_text())
    return run


def add_figures(report: Report, runs: Mapping[int, dict[str, Any]]) -> None:
    """Add the held-out rewards and their gain over the seeds, and the largest times and ages."""
    every = list(runs.values())
    report.add("held-out reward before", [run["eval_before"] for run in every], "reward")
    report.add("held-out reward after", [run["eval_after"] for run in every], "reward")
    report.add("gain", [run["gains"][SETTING]["reward"] for run in every], "reward")
    report.add("gain, lower end of its 95 % interval", [run["gains"][SETTING]["low"] for run in every], "reward")
    report.add("time of a run", [run["wall_s"] / 60 for run in every], "min")
    report.add("age of a trained token", [float(run["max_staleness_seen"]) for run in every], "versions", statistic=max)


def draw(path: Path, name: str, runs: Mapping[int, dict[str, Any]]) -> None:
    """Draw the training reward by step, and the held-out rewards with their intervals."""
    figure = Figure(figsize=(6, 3.5), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (seed, run) in enumerate(runs.items()):
        axes.plot(range(1, len(run["rewards"]) + 1), run["rewards"], alpha=0.5, color=f"C{index}")
        held_out = [(one["step"], one["settings"][SETTING]) for one in run["evaluations"]]
        steps, means = [step for step, _ in held_out], [one["reward"] for _, one in held_out]
        below = [one["reward"] - one["low"] for _, one in held_out]
        above = [one["high"] - one["reward"] for _, one in held_out]
        axes.errorbar(
            steps, means, [below, above], fmt="o", capsize=3, color=f"C{index}", label=f"seed {seed}, held out"
        )
    axes.set(xlabel="step", ylabel="mean reward", title=name)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
