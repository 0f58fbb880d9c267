"""Opens the database of the run that a command's options name (`agentrl.location` says how it is found)."""

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
    typer.Option("--run", help="Name or folder of the run; by default the newest in runs/.", show_default=False),
]
RequiredRun = Annotated[str, typer.Option("--run", help="Name or folder of the run.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="SQLAlchemy URL: sqlite:///FILE or postgresql://…; by default AGENTRL_DATABASE_URL, else that of the run.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Store:
    """An open database, and which run of it was asked for."""

    database: Database
    location: Location

    def run(self) -> Row[Any]:
        """The run that was named; where only a database was, its newest. Raises UserError for one it does not hold."""
        from agentrl.store import runs

        name = self.location.name
        if name is None:
            known = self.database.query(runs.all_runs)
            if not known:
                raise UserError(f"{self.database.where} holds no run")
            return known[0]
        try:
            return self.database.query(runs.by_name, name)
        except UserError as error:
            if self.location.by_environment and location.has_database(RUNS_DIR / name):
                own = RUNS_DIR / name
                raise UserError(
                    f"{DATABASE_URL} names a database without the run {name!r}, which {own} knows: "
                    f"unset the variable, or give --run {own}"
                ) from error
            raise


def find(run: str | None, database_url: str | None) -> Location:
    """Where the run is; prints which run was chosen when the user named none. Raises UserError."""
    found = location.locate(run, database_url, os.environ)
    if found.note is not None:
        say(found.note, err=True)
    return found


@contextmanager
def opened(run: str | None, database_url: str | None) -> Iterator[Store]:
    """The run's database, at the newest revision, until the block ends. Raises UserError, StoreError."""
    found = find(run, database_url)
    with connected(found) as database:
        database.require_current()
        yield Store(database, found)


@contextmanager
def connected(found: Location) -> Iterator[Database]:
    """The database, whatever its revision, until the block ends."""
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
