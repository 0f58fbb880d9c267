"""`agentrl store`: checks, prunes and backs up the database."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.located import DatabaseUrl, RequiredRun, Run, Store, connected, find, opened
from agentrl.cli.reward import reward
from agentrl.errors import UserError
from agentrl.visible import say

store = typer.Typer(help="Check, prune and back up the database.", no_args_is_help=True)
store.command()(reward)


@store.command()
def check(
    run: Annotated[
        str | None, typer.Option("--run", help="Name or folder of the run; default: all runs of the database.")
    ] = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Check the database, then the invariants of its runs: exact tokens, exactly-once training, bounded staleness,
    states, credit, counters.

    Prints each run's statistics as JSON. Violations go to stderr, one line each (`TABLE ID: what is wrong`), with exit
    status 1. Works while a run is active. An answer that was lost before it was recorded leaves no row to check.
    """
    from agentrl.cli.progress_bar import bar
    from agentrl.store import runs
    from agentrl.store.audit import run_audit

    broken, figures = 0, {}
    with connected(found := find(run, database_url)) as database:
        for line in database.integrity():
            say(f"database: {line}", err=True)
            broken += 1
        database.require_current()
        known = [Store(database, found).run()] if run is not None else database.query(runs.all_runs)
        for row in known:
            with database.read() as conn, bar(f"checking groups of {row.name}") as progress:
                for line in run_audit.scan(conn, row.id, progress):
                    say(line, err=True)
                    broken += 1
                figures[row.name] = run_audit.figures(conn, row.id)
    say(json.dumps(figures if run is None else figures[known[0].name], indent=2))
    say(f"{broken} violations")
    raise typer.Exit(1 if broken else 0)


@store.command()
def prune(
    run: RequiredRun,
    database_url: DatabaseUrl = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only groups that finished at least this long ago: 7d, 12h, 30m.")
    ] = None,
    keep_steps: Annotated[
        int | None, typer.Option(min=0, help="Only groups that finished before the newest N steps began.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and keep it.")] = False,
    vacuum: Annotated[bool, typer.Option("--vacuum", help="Then return the free space to the disk.")] = False,
) -> None:
    """Remove rejected, stale and evaluation groups that no step uses, and old events. Works while the run is active.

    Groups that a step has leased or trained are kept, so that every past batch can be rebuilt. The first and the newest
    evaluation are kept too.
    """
    from agentrl.cli.progress_bar import bar
    from agentrl.store.upkeep import retention

    if (older_than is None) == (keep_steps is None):
        raise UserError("give either --older-than or --keep-steps")
    age = parse_age(older_than) if older_than is not None else 0.0
    with opened(run, database_url) as store:
        database, run_id = store.database, store.run().id
        if keep_steps is None:
            cut = time.time() - age
        else:
            cut = database.query(retention.cut_before_steps, run_id, keep_steps)
        if dry_run:
            pruned = retention.estimate(database, run_id, cut)
        else:
            with bar("pruning groups") as progress:
                pruned = retention.prune(database, run_id, cut, progress)
            if vacuum:
                retention.vacuum(database)
    for table, rows in pruned.rows.items():
        say(f"{rows:>12,} {table}")
    say(f"{pruned.bytes:>12,} bytes of tokens and messages {'would be removed' if dry_run else 'removed'}")


@store.command()
def backup(
    target: Annotated[Path, typer.Argument(help="File to create.")],
    run: Run = None,
    database_url: DatabaseUrl = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy the database to a file while it is in use. The copy has all transactions committed before the start.

    SQLite: a database file, which is checked. PostgreSQL: an archive by pg_dump, for pg_restore.
    """
    from agentrl.cli.progress_bar import bar
    from agentrl.store.upkeep import backup

    with connected(find(run, database_url)) as database:
        with bar("copying pages") as progress:
            backup.backup(database, target, force=force, progress=progress)
        say(f"{database.where}: {target.stat().st_size:,} bytes in {target}")


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str, option: str = "--older-than") -> float:
    """Parse an age such as `7d`, `12h` or `1.5w` to seconds. Raises UserError naming the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if found is None:
        raise UserError(f"{option}: {text!r} is not an age; give a number and a unit (s, m, h, d, w), e.g. 7d")
    return float(found[1]) * _UNITS[found[2]]
