"""`agentrl demo`: trains a packaged model on a packaged task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a tiny model and an easy task; takes a few minutes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seeds task order, initialisation and the engine.")] = 0,
    runs_dir: Annotated[Path, typer.Option(help="Parent of the run's folder.")] = Path("runs"),
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for `agentrl train`.")] = None,
) -> None:
    """Train SmolLM2-135M to use a calculator (or, with --quick, a tiny model to reverse words), and show the result."""
    from agentrl.cli.train import exit_when_stopped
    from agentrl.console import Console
    from agentrl.launch.packaged_runs import run_demo

    with exit_when_stopped():
        run_demo(quick=quick, seed=seed, runs_dir=runs_dir, overrides=overrides or [], console=Console())
