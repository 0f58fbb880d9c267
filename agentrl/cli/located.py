"""Opens the database of the run that a command's options select (see `agentrl.location`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl import location
from agentrl.environment import DATABASE_URL
from agentrl.errors import UserError
from agentrl.location import RUNS_DIR, Location
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.store import Database, Row

Run = Annotated[
    str | None,
    typer.Option("--run", help="Name or folder of the run; default: the newest in runs/.", show_default=False),
]
RequiredRun = Annotated[str, typer.Option("--run", help="Name or folder of the run.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="SQLAlchemy URL: sqlite:///FILE or postgresql://…; default: AGENTRL_DATABASE_URL, else that of the run.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Store:
    """An open database and the selected run."""

    database: Database
    location: Location

    def run(self) -> Row[Any]:
        """The selected run, else the newest of the database. Raises UserError when the database does not have it."""
        from agentrl.store import runs

        name = self.location.name
        if name is None:
            known = self.database.query(runs.all_runs)
            if not known:
                raise UserError(f"{self.database.where} has no runs")
            return known[0]
        try:
            return self.database.query(runs.by_name, name)
        except UserError as error:
            if self.location.by_environment and location.has_database(RUNS_DIR / name):
                own = RUNS_DIR / name
                raise UserError(
                    f"{DATABASE_URL} names a database without run {name!r}, which is in {own}: "
                    f"unset the variable, or give --run {own}"
                ) from error
            raise


def find(run: str | None, database_url: str | None) -> Location:
    """Locate the run's database; prints the run that was selected by default. Raises UserError."""
    found = location.locate(run, database_url, os.environ)
    if found.note is not None:
        say(found.note, err=True)
    return found


@contextmanager
def opened(run: str | None, database_url: str | None) -> Iterator[Store]:
    """The run's database, checked to be at the newest revision, until the block ends. Raises UserError, StoreError."""
    found = find(run, database_url)
    with connected(found) as database:
        database.require_current()
        yield Store(database, found)


@contextmanager
def connected(found: Location) -> Iterator[Database]:
    """The database at any revision, until the block ends."""
    from agentrl.store import Database

    database = Database(found.database_url)
    try:
        yield database
    finally:
        database.close()


def folder_named(run: str) -> Path:
    """The folder of a run, by its name or path. Raises UserError."""
    found = location.locate(run, None, {}).folder
    assert found is not None
    return found
