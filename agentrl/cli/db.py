"""`agentrl db`: the store's schema."""

from __future__ import annotations

import typer

from agentrl.visible import say

db = typer.Typer(help="The store's schema.", no_args_is_help=True)

DatabaseUrl = typer.Option(
    ..., "--database-url", envvar="AGENTRL_DATABASE_URL", help="SQLAlchemy URL: sqlite:///FILE or postgresql://…"
)


@db.command()
def upgrade(database_url: str = DatabaseUrl) -> None:
    """Create the tables, or bring them to the newest revision. Safe to run any number of times."""
    from agentrl.store import Database

    database = Database(database_url)
    database.upgrade()
    database.close()
    say(f"{database.where} is at the newest revision")
