"""`agentrl key`: manages the admin and run keys of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from agentrl.cli.located import DatabaseUrl, RequiredRun, opened
from agentrl.cli.store import parse_age
from agentrl.domain.schemas import Power
from agentrl.errors import UserError
from agentrl.visible import say

key = typer.Typer(help="Create, list, rotate and revoke the admin and run keys of a run.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(metavar="KEY", help="The key's id or name, as shown by `list`.")]
ExpiresIn = Annotated[str | None, typer.Option(help="Expires after this time: 7d, 12h, 30m; default: never.")]


@key.command()
def create(
    run: RequiredRun,
    name: Annotated[str, typer.Option(help="Name shown in lists.")],
    power: Annotated[Power, typer.Option(help="admin: all rights. run: sessions, rewards, read access.")] = Power.RUN,
    expires_in: ExpiresIn = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Create a key and print it once; the store keeps its hash. Proxies accept it at once."""
    from agentrl.store import key_records

    if power is Power.SESSION:
        raise UserError("--power session: a session's key is created with its session")
    made = _write(database_url, run, key_records.create, power, name, _end(expires_in))
    say(made.key)


@key.command("list")
def list_keys(run: RequiredRun, database_url: DatabaseUrl = None) -> None:
    """Print the keys' metadata as JSON: id, name, power, creation and expiry. The keys themselves are not stored."""
    from agentrl.store import key_records

    say(json.dumps(_write(database_url, run, key_records.listing), indent=2))


@key.command()
def revoke(which: Which, run: RequiredRun, database_url: DatabaseUrl = None) -> None:
    """Revoke a key. Proxies reject it within seconds."""
    from agentrl.store import key_records

    say(f"{_write(database_url, run, key_records.revoke, which)} is revoked")


@key.command()
def rotate(
    which: Which,
    run: RequiredRun,
    overlap: Annotated[
        str | None, typer.Option(help="The old key expires after this time: 1h, 0s; default: when it is revoked.")
    ] = None,
    expires_in: ExpiresIn = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Create a replacement for a key and print it once."""
    from agentrl.store import key_records

    overlap_s = None if overlap is None else parse_age(overlap, "--overlap")
    made = _write(database_url, run, key_records.rotate, which, overlap_s=overlap_s, expires_at=_end(expires_in))
    say(made.key)


def _end(expires_in: str | None) -> float | None:
    return None if expires_in is None else time.time() + parse_age(expires_in, "--expires-in")


def _write(database_url: str | None, run: str, unit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with opened(run, database_url) as store:
        return store.database.transact(unit, store.run().id, *args, **kwargs)
