"""`agentrl export`: writes a run's rows to files, or a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from functools import partial
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
    merge: Annotated[
        str | None,
        typer.Option(
            help="Write the mean of checkpoints: 100,200,latest, or weighted, 100:1,200:3.", show_default=False
        ),
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="Of a checkpoint, take the running average of the weights.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder to create (--checkpoint, --merge).", show_default=False)
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
    if checkpoint is not None or merge is not None:
        given = "--checkpoint" if checkpoint is not None else "--merge"
        if to is None or out is not None:
            raise UserError(f"{given} needs --to FOLDER, and no --out")
        if merge is not None and (checkpoint is not None or adapter):
            raise UserError("--merge goes without --checkpoint and --adapter: the mean of adapters is no adapter")
        with opened(run, database_url) as store:
            return _export_model(store, checkpoint, merge, to, model, average, not adapter, verify, force)
    if out is None or to is not None or average:
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


def _export_model(
    store: Store,
    which: str | None,
    merge: str | None,
    to: Path,
    model: Path | None,
    average: bool,
    merged: bool,
    verify: bool,
    force: bool,
) -> None:
    """Write a checkpoint of the selected run, or the mean of several, as a folder. Raises UserError and StoreError."""
    from agentrl.configs.run_config import RunConfig
    from agentrl.export import exported_model
    from agentrl.trainer.stored_lineage import StoredLineage

    row = store.run()
    config = RunConfig.model_validate(row.config)
    base_model = model or Path(row.base_model)
    if not base_model.is_dir():
        raise UserError(f"the run's base model {base_model} is not on this machine: give its folder with --model")
    lineage = StoredLineage.of(store.database, config)
    choose = partial(exported_model.choose, config, lineage, run_dir=store.location.folder or config.run_dir)
    how = {"average": average, "verify": verify, "force": force}
    if which is not None:
        written = exported_model.write(choose(which), to, config, base_model, merged=merged, **how)
    else:
        assert merge is not None
        found = [(choose(one, option="--merge"), weight) for one, weight in exported_model.weighted(merge)]
        written = exported_model.write_mean(found, to, config, base_model, **how)
    of = f"step {written.steps[0]}" if which is not None else f"mean of steps {', '.join(map(str, written.steps))}"
    say(f"{of}, {written.bytes:,} bytes: {written.path}")
