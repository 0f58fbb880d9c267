"""`agentrl run`: make a run without starting anything, and list those there are."""

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

run = typer.Typer(help="Make a run without starting anything; list the runs.", no_args_is_help=True)

RECORDING: dict[str, object] = {"steps": 0, "rollout": {"group_size": 1, "min_group_size": 1}}
"""A run without a config file: nothing is trained, and each program's session stands for itself."""


@run.command()
def create(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [SECTION.KEY=VALUE]…", help="A run's YAML file, and overrides.", show_default=False
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The run's name; needed without a config file.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="tiny, smollm2 or a Hugging Face folder: what the engines serve.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="AGENTRL_RUN_KEY", help="The run's key.", show_default="a new one")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option("--database-url", help="SQLAlchemy URL; by default as for `agentrl train`.", show_default=False),
    ] = None,
) -> None:
    """Make a run, so that `agentrl proxy` can serve it to programs that agentrl does not start.

    Without a config file it only records. The run's key is printed as a shell's `export`, here and never again: only
    its hash is stored. Everything else goes to stderr.
    """
    from agentrl.configs import cautions
    from agentrl.domain.schemas import Power
    from agentrl.environment import RUN_KEY, key_from
    from agentrl.launch.create import create_run
    from agentrl.store.key_records import new_key

    settings = _config(config or [], {"name": name, "model": model, "database_url": database_url})
    key = key_from({RUN_KEY: key or ""}, RUN_KEY) or new_key(Power.RUN)
    create_run(settings, key)
    say(f"export {RUN_KEY}={shlex.quote(key)}")
    for caution in cautions.of(settings):
        say(caution, err=True)
    say(
        f"run {settings.name} is made; agentrl proxy --run {settings.name} --engine http://HOST:PORT serves it",
        err=True,
    )


@run.command("list")
def list_runs(
    database_url: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL; by default AGENTRL_DATABASE_URL, else the databases of the runs in runs/.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the runs of a database, or of all that runs/ has folders of; newest first."""
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
    """Let a run that was stopped or has failed go on: it takes groups again. `agentrl train` does so by itself."""
    from agentrl.store import runs

    with opened(name, database_url) as store:
        row = store.run()
        store.database.transact(runs.resume, row.id)
    say(f"run {row.name} takes groups again")


def _databases(database_url: str | None) -> list[Location]:
    """The database that is named, else those of the folders in runs/. Raises UserError when there is none."""
    folders = location.folders()
    if database_url or os.environ.get(DATABASE_URL) or not folders:
        return [location.locate(None, database_url, os.environ)]
    return [location.locate(str(folder), None, os.environ) for folder in folders]


def _config(args: list[str], flags: dict[str, str | None]) -> RunConfig:
    """Of a file and overrides, or of `--name` and `--model` alone; flags win. Raises ConfigError."""
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
