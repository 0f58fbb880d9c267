"""`agentrl proxy`: serves a run's model to agents and records every call."""

from __future__ import annotations

import gc
import os
import secrets
import socket
from functools import partial

import typer

from agentrl.cli.located import DatabaseUrl, RequiredRun, find
from agentrl.environment import is_loopback
from agentrl.errors import UserError
from agentrl.visible import log_to_stderr, say


def proxy(
    run: RequiredRun,
    engine: list[str] = typer.Option(
        [],
        "--engine",
        help="URL of an engine; repeat for several. vllm+http://HOST:PORT names its backend, if it is not the run's. "
        "Others join by `agentrl engine --join`.",
    ),
    database_url: DatabaseUrl = None,
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8080, min=0, max=65535, help="Port to listen on; 0 picks a free one."),
    workers: int = typer.Option(1, min=1, help="Number of processes that serve the port."),
    log_level: str = typer.Option("info", help="debug, info, warning or error."),
) -> None:
    """Serve the OpenAI API in front of SGLang and record every call in the store.

    The admin key comes from AGENTRL_ADMIN_KEY; on loopback the default is a random key. The engines' keys come from
    AGENTRL_ENGINE_KEY or AGENTRL_ENGINE_KEYS; engines off loopback require one.
    """
    from agentrl.engine.engine_keys import EngineKeys

    found = find(run, database_url)
    assert found.name is not None
    run, url = found.name, found.database_url
    keys = EngineKeys.from_env(os.environ)
    keys.check(engine)
    admin_key = os.environ.get("AGENTRL_ADMIN_KEY", "")
    if not admin_key:
        if not is_loopback(host):
            raise UserError(f"--host {host} is not loopback: set AGENTRL_ADMIN_KEY first")
        admin_key = f"arl-admin-{secrets.token_urlsafe(24)}"
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    replica = f"{socket.gethostname()[:50]}:{port}"  # stable across restarts, different on each machine
    where = f"agentrl proxy for run {run} on http://{host}:{port}"
    log_to_stderr(log_level)
    if workers > 1:
        from agentrl.proxy.serving.prefork import Job, supervise

        job = Job(run_name=run, engine_urls=engine, replica=replica, log_level=log_level, listener=listener.fileno())
        environment = {"AGENTRL_DATABASE_URL": url, "AGENTRL_ADMIN_KEY": admin_key}
        environment |= keys.variables(engine)
        serving = partial(say, f"{where}, {workers} workers")
        raise typer.Exit(supervise(job, workers, environment, serving))

    gc.disable()  # until everything is loaded: a tenth of the start
    import uvicorn

    from agentrl.proxy.app import Settings, create_app
    from agentrl.proxy.serving import connections

    settings = Settings(
        database_url=url,
        run_name=run,
        engine_urls=engine,
        engine_keys=keys,
        admin_key=admin_key,
        replica=replica,
        listens=listener.getsockname()[:2],
    )
    app = create_app(settings)
    say(where)
    connections.keep_what_is_loaded()
    server = uvicorn.Server(connections.server_config(app, log_level))
    server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before heavy imports. Raises UserError when the port is in use or the address is not local."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(2048)
    return listener
