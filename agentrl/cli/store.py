"""`agentrl store`: look into a run's rows."""

from __future__ import annotations

import json

import typer

from agentrl.cli.db import DatabaseUrl

store = typer.Typer(help="Look into a run's rows.", no_args_is_help=True)


@store.command()
def check(
    run: str = typer.Option(..., "--run", help="Name of the run."),
    database_url: str = DatabaseUrl,
) -> None:
    """Check a run's promises row by row: exact tokens, exactly-once training, bounded staleness, counters.

    Prints figures as JSON; exits with status 1 and one line per violation when a promise is broken.
    """
    from agentrl.store import Database, audit, runs

    database = Database(database_url)
    database.require_current()
    with database.read() as conn:
        run_id = runs.by_name(conn, run).id
        broken, figures = audit.violations(conn, run_id), audit.figures(conn, run_id)
    database.close()
    typer.echo(json.dumps(figures, indent=2))
    for line in broken:
        typer.echo(line, err=True)
    typer.echo(f"{len(broken)} violations")
    raise typer.Exit(1 if broken else 0)
