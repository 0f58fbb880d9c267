"""`agentrl export`: writes a run's rows to files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.located import DatabaseUrl, Run, opened
from agentrl.visible import say


def export(
    out: Annotated[Path, typer.Option("--out", help="File or folder to create.")],
    run: Run = None,
    database_url: DatabaseUrl = None,
    what: Annotated[str, typer.Option(help="trajectories, tokens, interactions, rewards or steps.")] = "trajectories",
    format_: Annotated[
        str,
        typer.Option("--format", help="parquet or jsonl; for trajectories also areal (text) or tensors (safetensors)."),
    ] = "parquet",
    state: Annotated[str | None, typer.Option(help="Only rows in these states, e.g. trained,ready.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only rows that these steps trained: 5, 3..7, 3.. or ..7.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder whose tokenizer decodes text (areal).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the existing output.")] = False,
) -> None:
    """Write a run's rows as Parquet, JSONL, AReaL's dump or padded tensors. Works while the run is active.

    The output is atomic: it appears complete or not at all.
    """
    from agentrl.cli.progress_bar import bar
    from agentrl.domain.selection import Selection, require_choice
    from agentrl.export.job import FORMATS, Job

    selection = Selection.parse(what, state, steps)
    require_choice("--format", format_, FORMATS)
    with opened(run, database_url) as store:
        job = Job(
            database=store.database,
            run=store.run(),
            selection=selection,
            format=format_,
            out=out,
            force=force,
            tokenizer=tokenizer,
        )
        with bar(f"exporting {what}") as progress:
            written = job.execute(progress)
    say(f"{written.rows:,} {what}, {written.bytes:,} bytes: {written.path}")
