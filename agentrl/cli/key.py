"""`agentrl key`: who may do what in a run."""

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

key = typer.Typer(help="Make, list, rotate and revoke the admin and run keys of a run.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(metavar="KEY", help="The key's id or name, as `list` shows them.")]
ExpiresIn = Annotated[str | None, typer.Option(help="It ends after so long: 7d, 12h, 30m. Without: never.")]


@key.command()
def create(
    run: RequiredRun,
    name: Annotated[str, typer.Option(help="What it is called in lists.")],
    power: Annotated[Power, typer.Option(help="admin: everything. run: sessions, rewards, looking.")] = Power.RUN,
    expires_in: ExpiresIn = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key and print it, this once: the store keeps its hash. Proxies accept it at once."""
    from agentrl.store import key_records

    if power is Power.SESSION:
        raise UserError("--power session: a session's key comes with its session")
    made = _write(database_url, run, key_records.create, power, name, _end(expires_in))
    say(made.key)


@key.command("list")
def list_keys(run: RequiredRun, database_url: DatabaseUrl = None) -> None:
    """Show the keys as JSON: id, name, power, when they were made and when they end. Never the keys themselves."""
    from agentrl.store import key_records

    say(json.dumps(_write(database_url, run, key_records.listing), indent=2))


@key.command()
def revoke(which: Which, run: RequiredRun, database_url: DatabaseUrl = None) -> None:
    """End a key: proxies refuse it within seconds."""
    from agentrl.store import key_records

    say(f"{_write(database_url, run, key_records.revoke, which)} is revoked")


@key.command()
def rotate(
    which: Which,
    run: RequiredRun,
    overlap: Annotated[
        str | None, typer.Option(help="The old one ends after so long: 1h, 0s. Without: when it is revoked.")
    ] = None,
    expires_in: ExpiresIn = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key in place of another and print it, this once."""
    from agentrl.store import key_records

    overlap_s = None if overlap is None else parse_age(overlap, "--overlap")
    made = _write(database_url, run, key_records.rotate, which, overlap_s=overlap_s, expires_at=_end(expires_in))
    say(made.key)


def _end(expires_in: str | None) -> float | None:
    return None if expires_in is None else time.time() + parse_age(expires_in, "--expires-in")


def _write(database_url: str | None, run: str, unit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with opened(run, database_url) as store:
        return store.database.transact(unit, store.run().id, *args, **kwargs)
