"""`agentrl export`: writes a run's rows to files, or a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.located import DatabaseUrl, Run, opened
from agentrl.errors import UserError
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.cli.located import Store


def export(
    out: Annotated[Path | None, typer.Option("--out", help="File or folder to create.", show_default=False)] = None,
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
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Write a checkpoint as a Hugging Face folder: a step, latest or best.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder to create (--checkpoint).", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the base model, if it is not where the run had it.", show_default=False),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, in peft's format.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the checkpoint's bytes first.")] = False,
) -> None:
    """Write a run's rows as Parquet, JSONL, AReaL's dump or padded tensors; or, with --checkpoint, its model.

    Works while the run is active. The output is atomic: it appears complete or not at all. --checkpoint latest --to
    FOLDER writes a folder for transformers and engines from the sharded files, tensor by tensor, without a GPU.
    """
    if checkpoint is not None:
        if to is None or out is not None:
            raise UserError("--checkpoint needs --to FOLDER, and no --out")
        with opened(run, database_url) as store:
            return _export_checkpoint(store, checkpoint, to, model, merged=not adapter, verify=verify, force=force)
    if out is None or to is not None:
        raise UserError("give --out FILE for rows, or --checkpoint STEP --to FOLDER for a model")
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


def _export_checkpoint(
    store: Store, which: str, to: Path, model: Path | None, *, merged: bool, verify: bool, force: bool
) -> None:
    """Write a checkpoint of the selected run as a folder. Raises UserError and StoreError."""
    from agentrl.configs.run_config import RunConfig
    from agentrl.export import exported_model
    from agentrl.trainer.stored_lineage import StoredLineage

    row = store.run()
    config = RunConfig.model_validate(row.config)
    base_model = model or Path(row.base_model)
    if not base_model.is_dir():
        raise UserError(f"the run's base model {base_model} is not on this machine: give its folder with --model")
    lineage = StoredLineage.of(store.database, config)
    found = exported_model.choose(config, lineage, which, store.location.folder or config.run_dir)
    written = exported_model.write(found, to, config, base_model, merged=merged, verify=verify, force=force)
    say(f"step {written.step}, {written.bytes:,} bytes: {written.path}")
