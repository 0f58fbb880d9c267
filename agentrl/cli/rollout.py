"""`agentrl rollout`: run agents against a proxy, from any machine that reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rollout(
    config: Annotated[Path, typer.Option(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for `agentrl train`.")] = None,
    url: Annotated[
        str | None, typer.Option(envvar="AGENTRL_PROXY_URL", help="The proxy, e.g. http://127.0.0.1:8000.")
    ] = None,
    run_key: Annotated[
        str | None, typer.Option(envvar="AGENTRL_RUN_KEY", help="The run's key.", show_default=False)
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(help="This worker's name. Restarted under the same one, it abandons what its dead process left."),
    ] = None,
) -> None:
    """Play the run's tasks with its agent until the run is finished, and its evaluations beside them."""
    from agentrl.config import load_config
    from agentrl.rollout.worker import run_worker

    run_worker(load_config(config, overrides), base_url=url, api_key=run_key, owner=owner)
