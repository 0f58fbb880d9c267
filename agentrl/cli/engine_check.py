"""`agentrl engine check`: says what an engine can do, and what it lacks for training."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from agentrl.errors import UserError
from agentrl.visible import say


def check(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the engine: http://HOST:PORT, or vllm+http://HOST:PORT.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Timeout of each of the two sampled answers.")] = 60.0,
) -> None:
    """Show what an engine is, what it can do, and what it lacks for training. Samples two answers of 4 tokens.

    The key comes from AGENTRL_ENGINE_KEYS or AGENTRL_ENGINE_KEY; without them that of an engine which joined by --join
    is derived from AGENTRL_ADMIN_KEY. Exit status: 0 ready for training; 1 not ready; 2 invalid arguments.
    """
    import asyncio

    from agentrl.configs.engine_config import engine_address
    from agentrl.console import report_console
    from agentrl.doctor.engine_examination import examine
    from agentrl.doctor.show_engine import show_engine
    from agentrl.engine.engine_keys import EngineKeys, derived_key
    from agentrl.environment import ADMIN_KEY, ENGINE_KEY, key_from

    try:
        address = engine_address(url, f"; use {ENGINE_KEY}")
    except ValueError as error:
        raise UserError(f"URL: {error}") from None
    key = EngineKeys.from_env(os.environ).of(address.url)
    admin_key = key_from(os.environ, ADMIN_KEY)
    if key is None and admin_key is not None:
        key = derived_key(admin_key, address.url)
    report = asyncio.run(examine(address.url, key, address.backend, timeout_s))
    if as_json:
        say(json.dumps(report.as_json(), indent=2))
    else:
        show_engine(report, report_console())
    raise typer.Exit(0 if report.ready else 1)
