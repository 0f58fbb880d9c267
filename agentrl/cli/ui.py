"""`agentrl ui`: serves the dashboard without a proxy."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.cli.located import DatabaseUrl, opened
from agentrl.errors import UserError
from agentrl.visible import say

STOPPED = 130


def ui(
    run: Annotated[
        str | None, typer.Argument(help="Name or folder of a run; default: the newest in runs/.", show_default=False)
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", help="Open the page of this session.", show_default=False)
    ] = None,
    database_url: DatabaseUrl = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8090,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Show runs in a browser: what they learn, who waits for whom, where the samples went, every session and token.

    Reads the database directly: no proxy needs to run, and runs that have ended are shown too. All runs of the database
    are shown. Anybody who has the printed link can open the pages. The proxy of an active run serves them under /ui.
    """
    from agentrl.dashboard import own_server
    from agentrl.store.sessions import session_lookup

    with opened(run, database_url) as store:
        page = f"/ui/runs/{store.run().name}"
        if session is not None:
            if store.database.query(session_lookup.get, session) is None:
                raise UserError(f"--session: the database has no session {session!r}")
            page = f"/ui/sessions/{session}"
        try:
            own_server.serve(store.database, host, port, page, lambda link: say(f"{link}\nCtrl-C stops"))
        except KeyboardInterrupt:
            raise typer.Exit(STOPPED) from None
