"""`agentrl rollout`: runs agents against a proxy, from any machine that can reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl import location
from agentrl.cli.located import folder_named
from agentrl.environment import PROXY_URL, RUN_KEY
from agentrl.errors import UserError


def rollout(
    config: Annotated[Path | None, typer.Option(help="The run's YAML file.", show_default=False)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for `agentrl train`.")] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", help="Name or folder of an active run; sets --config, --url and --run-key.", show_default=False
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(envvar="AGENTRL_PROXY_URL", help="URL of the proxy, e.g. http://127.0.0.1:8000.")
    ] = None,
    run_key: Annotated[
        str | None, typer.Option(envvar="AGENTRL_RUN_KEY", help="The run's key.", show_default=False)
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(help="This worker's name. A restart with the same name abandons the groups of the dead process."),
    ] = None,
) -> None:
    """Run the agent on the run's tasks, and its evaluations, until the run is finished."""
    from agentrl.configs.config_files import load_config
    from agentrl.rollout.worker import run_worker

    if run is not None:
        folder = folder_named(run)
        config = config or folder / location.CONFIG
        env = location.proxy_of(folder)
        url, run_key = url or env.get(PROXY_URL), run_key or env.get(RUN_KEY)
    if config is None:
        raise UserError("which run? give --config FILE, or --run NAME of an active run")
    run_worker(load_config(config, overrides), base_url=url, api_key=run_key, owner=owner)
