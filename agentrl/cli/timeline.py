"""`agentrl timeline`: writes a run as a trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.located import DatabaseUrl, Run, opened
from agentrl.visible import say


def timeline(
    out: Annotated[Path, typer.Option("--out", help="File to create, for example run.json.gz.")],
    run: Run = None,
    database_url: DatabaseUrl = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the existing file.")] = False,
) -> None:
    """Write a run's steps, publishes, episodes and calls as one trace, to open in ui.perfetto.dev or chrome://tracing.

    Works while the run is active. A name that ends with .gz is compressed.
    """
    from agentrl.cli.progress_bar import bar
    from agentrl.export import chrome_trace
    from agentrl.export.output import atomic_file

    with (
        opened(run, database_url) as store,
        atomic_file(out, force=force) as draft,
        bar("writing the timeline") as progress,
    ):
        written = chrome_trace.write(draft, store.database, store.run(), progress, compressed=out.suffix == ".gz")
    say(f"{written:,} events, {out.stat().st_size:,} bytes: {out}")
