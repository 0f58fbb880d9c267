"""`agentrl logs`: shows the logs of a run's processes, on whatever hosts they run."""

from __future__ import annotations

from typing import Annotated

import typer


def logs(
    run: Annotated[
        str | None, typer.Argument(help="Name or folder of a run; default: the newest in runs/.", show_default=False)
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="engine-0, proxy, trainer, rollout, …; repeat for several.", show_default=False),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10_000, help="Last lines of each log.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines as they are written.")] = False,
) -> None:
    """Show the logs of all processes of a run, one line after another with the name of its process."""
    from agentrl import location
    from agentrl.cli.located import folder_named
    from agentrl.launch.views import run_logs
    from agentrl.visible import say

    folder = (location.newest(location.RUNS_DIR) if run is None else folder_named(run)) / "logs"
    names = run_logs.chosen(folder, part or [])
    width = max((len(name) for name in names), default=0)
    for name, line in run_logs.newest(folder, names, lines):
        say(f"{name:<{width}} | {line}")
    if follow:
        try:
            for name, line in run_logs.follow(folder, lambda: run_logs.chosen(folder, part or [])):
                say(f"{name:<{width}} | {line}")
        except KeyboardInterrupt:
            return
