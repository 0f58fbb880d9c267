"""`agentrl proxy`: serve a run's model to its agents, recording every call."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket

import typer

from agentrl.errors import UserError


def proxy(
    run: str = typer.Option(..., "--run", help="Name of the run, as `agentrl train` or the store created it."),
    engine: list[str] = typer.Option(..., "--engine", help="URL of an SGLang server; repeat for several."),
    database_url: str = typer.Option(
        ..., "--database-url", envvar="AGENTRL_DATABASE_URL", help="SQLAlchemy URL of the store."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8080, min=0, max=65535, help="Port to listen on; 0 picks a free one."),
    log_level: str = typer.Option("info", help="debug, info, warning or error."),
) -> None:
    """Serve OpenAI's API in front of SGLang and record every call in the store.

    The admin key comes from AGENTRL_ADMIN_KEY; on loopback one is made up when it is not set.
    """
    admin_key = os.environ.get("AGENTRL_ADMIN_KEY", "")
    if not admin_key:
        if not _is_loopback(host):
            raise UserError(f"--host {host} is not loopback: set AGENTRL_ADMIN_KEY first")
        admin_key = secrets.token_urlsafe(24)
    listener = _listen(host, port)

    import logging

    import uvicorn

    from agentrl.proxy.app import Settings, create_app

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    port = listener.getsockname()[1]
    replica = f"{socket.gethostname()[:50]}:{port}"  # the same after a restart, another one on another machine
    settings = Settings(
        database_url=database_url, run_name=run, engine_urls=engine, admin_key=admin_key, replica=replica
    )
    app = create_app(settings)
    typer.echo(f"agentrl proxy for run {run} on http://{host}:{port}")
    server = uvicorn.Server(
        uvicorn.Config(
            app, loop="uvloop", http="httptools", log_level=log_level, access_log=False, timeout_graceful_shutdown=10
        )
    )
    server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded. Raises UserError when the port is taken or the address is not ours."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(2048)
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
