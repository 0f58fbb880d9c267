"""`agentrl plan`: shows which host and GPUs each part of a run would get, and starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.visible import say


def plan(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, e.g. resources=sglang:d4t2+fsdp:d8.")
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, max=10_000, help="Number of hosts, with --gpus.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(min=0, max=1_000, help="GPUs of each host; default: this machine and its GPUs.")
    ] = None,
) -> None:
    """Show where the engines and the trainer of a run go. Exits with status 2 when they do not fit.

    With --gpus the plan is for hosts of that many GPUs, which need not exist.
    """
    from agentrl.configs.config_files import load_config
    from agentrl.errors import UserError
    from agentrl.launch import parts
    from agentrl.placement.hosts import like_hosts
    from agentrl.placement.plan_table import plan_lines

    if hosts > 1 and gpus is None:
        raise UserError("--hosts needs --gpus")
    run = load_config(config, overrides)
    assignment = parts.assign_here(run) if gpus is None else parts.assign_to(run, like_hosts(hosts, gpus), gpus > 0)
    for line in [*plan_lines(assignment), *parts.sharing_lines(run, assignment)]:
        say(line)
