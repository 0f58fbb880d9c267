"""`agentrl run`: creates a run without starting processes, and lists runs."""

from __future__ import annotations

import json
import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl import location
from agentrl.cli.located import DatabaseUrl, connected, opened
from agentrl.environment import DATABASE_URL
from agentrl.errors import ConfigError
from agentrl.location import Location
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.configs.run_config import RunConfig
    from agentrl.store import Row

run = typer.Typer(help="Create a run without starting processes; list runs.", no_args_is_help=True)

RECORDING: dict[str, object] = {"steps": 0, "rollout": {"group_size": 1, "min_group_size": 1}}
"""The config of a run without a config file: it records only, and each session is its own group."""


@run.command()
def create(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [SECTION.KEY=VALUE]…", help="A run's YAML file and overrides.", show_default=False
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The run's name; required without a config file.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model that the engines serve: tiny, smollm2 or a Hugging Face folder."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="AGENTRL_RUN_KEY", help="The run's key.", show_default="a new one")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option("--database-url", help="SQLAlchemy URL; default: as for `agentrl train`.", show_default=False),
    ] = None,
) -> None:
    """Create a run that `agentrl proxy` can serve to programs that agentrl does not start.

    Without a config file the run records only. The run's key is printed once, as a shell `export`, as soon as the run
    can be used; the store keeps its hash. Other output goes to stderr. If the command is killed while it stores tasks,
    the same command stores the rest, under a new key. The tasks of a function without `limit` are stored as the run
    takes them: the command then ends with the run.
    """
    from agentrl.cli.progress_bar import bar
    from agentrl.domain.schemas import Power
    from agentrl.environment import RUN_KEY, key_from
    from agentrl.launch.create import create_run
    from agentrl.launch.tasks.task_ingestion import WAITS, Progress
    from agentrl.store.key_records import new_key

    settings = _config(config or [], {"name": name, "model": model, "database_url": database_url})
    key = key_from({RUN_KEY: key or ""}, RUN_KEY) or new_key(Power.RUN)
    printed = noted = False
    with bar("storing tasks") as progress:

        def show(tasks: Progress) -> None:
            nonlocal printed, noted
            progress(tasks.stored, tasks.stored if tasks.complete else None)
            if tasks.usable and not printed:
                say(f"export {RUN_KEY}={shlex.quote(key)}")
                printed = True
            if tasks.waits and not noted:
                say(f"{WAITS.format(tasks.stored)}: leave this command running, until the run ends", err=True)
                noted = True

        create_run(settings, key, show)
    for caution in settings.cautions:
        say(caution, err=True)
    say(
        f"run {settings.name} created; serve it with agentrl proxy --run {settings.name} --engine http://HOST:PORT",
        err=True,
    )


@run.command("list")
def list_runs(
    database_url: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL; default: AGENTRL_DATABASE_URL, else the databases of the runs in runs/.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the runs of one database, or of all runs in runs/; newest first."""
    from rich.table import Table

    from agentrl.console import Console
    from agentrl.store import runs

    rows: dict[str, Row[Any]] = {}
    for found in _databases(database_url):
        with connected(found) as database:
            database.require_current()
            rows |= {row.id: row for row in database.query(runs.all_runs)}
    table = Table("run", "status", "steps", "version", "model", "made")
    for _, row in sorted(rows.items(), reverse=True):  # ids sort by time
        made = datetime.fromtimestamp(row.created_at).astimezone().strftime("%Y-%m-%d %H:%M")
        steps = f"{row.published_step} of {row.target_steps}" if row.target_steps else "records only"
        table.add_row(row.name, row.status, steps, str(row.current_version), row.base_model, made)
    Console().print(table)


@run.command()
def reopen(
    name: Annotated[str, typer.Argument(help="The run's name or folder.")],
    database_url: DatabaseUrl = None,
) -> None:
    """Let a stopped or failed run admit groups again. `agentrl train` does this itself."""
    from agentrl.store import runs

    with opened(name, database_url) as store:
        row = store.run()
        store.database.transact(runs.resume, row.id)
    say(f"run {row.name} admits groups again")


def _databases(database_url: str | None) -> list[Location]:
    """The given database, else the databases of the folders in runs/. Raises UserError when there are none."""
    folders = location.folders()
    if database_url or os.environ.get(DATABASE_URL) or not folders:
        return [location.locate(None, database_url, os.environ)]
    return [location.locate(str(folder), None, os.environ) for folder in folders]


def _config(args: list[str], flags: dict[str, str | None]) -> RunConfig:
    """The configuration from a file and overrides, or from `--name` and `--model`. Flags win. Raises ConfigError."""
    from agentrl.configs.config_files import apply_override, load_config, parse_config

    overrides = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    if args and "=" not in args[0]:
        return load_config(Path(args[0]), [*args[1:], *overrides])
    if flags["name"] is None or flags["model"] is None:
        raise ConfigError("give a config file, or --name and --model")
    data = json.loads(json.dumps(RECORDING))
    for item in [*args, *overrides]:
        apply_override(data, item)
    return parse_config(data)
