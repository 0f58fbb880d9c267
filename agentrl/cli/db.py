"""`agentrl db`: creates and upgrades the store's schema."""

from __future__ import annotations

import typer

from agentrl.cli.located import DatabaseUrl, Run, connected, find
from agentrl.visible import say

db = typer.Typer(help="The store's schema.", no_args_is_help=True)


@db.command()
def upgrade(run: Run = None, database_url: DatabaseUrl = None) -> None:
    """Create the tables, or upgrade them to the newest revision. Can be repeated safely."""
    with connected(find(run, database_url)) as database:
        database.upgrade()
        say(f"{database.where} is at the newest revision")
