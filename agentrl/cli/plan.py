"""`agentrl plan`: shows where the parts of a run go, and what they take in memory and time; starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.configs.run_config import RunConfig
from agentrl.visible import say

EXAMPLES = """
Show where the engines and the trainer of a run go, and whether their memory suffices. Starts nothing.

\b
    agentrl plan run.yaml --gpus 8                    where each part goes on a host with 8 GPUs
    agentrl plan run.yaml --gpus 8xH100-80            also: memory, step time, key/value cache, a proposal
    agentrl plan run.yaml --gpus 8xH100-80 --nodes 4 --model Qwen3-32B --tokens 16384
    agentrl plan run.yaml --gpus 8xB200 --model ./folder --json

With a kind of GPUs, the trainer's own step is traced on a fake accelerator: nothing is downloaded and no GPU is needed,
but a C++ compiler is. That takes seconds to a few minutes. --model takes a folder, a config.json, or a known shape.

Exits with status 2 when the parts do not fit on the hosts, and with 1 when no setting fits in memory.
"""


def plan(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, e.g. resources=sglang:d4t2+fsdp:d8.")
    ] = None,
    hosts: Annotated[
        int, typer.Option("--hosts", "--nodes", min=1, max=10_000, help="Number of hosts, with --gpus.")
    ] = 1,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs of each host: 8, or with their kind, 8xH100-80; default: this machine's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, config.json or known shape; default: the config's model.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, max=2**24, help="Tokens of a trajectory; default: engine.context_length.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, max=2**24, help="Of these, in the prompt of a group; default: an eighth.")
    ] = None,
    network: Annotated[
        float, typer.Option(min=0.1, max=10_000, help="GB/s of each GPU between hosts, in one direction.")
    ] = 50.0,
    disk: Annotated[float, typer.Option(min=0.001, max=10_000, help="GB/s of a host to its disk.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show where the parts of a run go, and what they take."""
    from agentrl.configs.config_files import load_config
    from agentrl.errors import UserError
    from agentrl.launch import parts
    from agentrl.placement.hosts import like_hosts
    from agentrl.placement.plan_table import plan_lines

    if hosts > 1 and gpus is None:
        raise UserError("--hosts needs --gpus")
    run = load_config(config, overrides)
    if gpus is not None and not gpus.isdecimal():
        _show_memory(run, gpus, hosts, model or run.model, tokens, prompt, network * 1e9, disk * 1e9, as_json)
        return
    if as_json or model or tokens or prompt:
        raise UserError("--json, --model, --tokens and --prompt need a kind of GPUs: --gpus 8xH100-80")
    if gpus is not None and int(gpus) > MOST_GPUS:
        raise UserError(f"--gpus {gpus}: a host has at most {MOST_GPUS}")
    count = None if gpus is None else int(gpus)
    assignment = parts.assign_here(run) if count is None else parts.assign_to(run, like_hosts(hosts, count), count > 0)
    for line in [*plan_lines(assignment), *parts.sharing_lines(run, assignment)]:
        say(line)


plan.__doc__ = EXAMPLES
MOST_GPUS = 1000


def _show_memory(
    run: RunConfig,
    gpus: str,
    hosts: int,
    model: str,
    tokens: int | None,
    prompt: int | None,
    network: float,
    disk: float,
    as_json: bool,
) -> None:
    import json

    from agentrl.cli.progress_bar import bar
    from agentrl.trainer.planning import plan_input

    count, device = plan_input.gpus_of(gpus)
    name, shape = plan_input.shape_of(model)
    work = plan_input.workload_of(run, shape, tokens, prompt)
    ranks = plan_input.trainer_ranks(run, count * hosts, hosts)

    from agentrl.trainer.planning import plan_text, run_plan
    from agentrl.trainer.planning.step_estimate import Cluster

    with bar(f"tracing {name}") as progress:
        done = 0

        def step(what: str) -> None:
            nonlocal done
            say(what, err=True)
            progress(done := done + 1, None)

        found = run_plan.make_plan(run, name, shape, Cluster(device, count, hosts, network), work, ranks, step)
    if as_json:
        say(json.dumps(plan_text.plan_json(found, disk), indent=2))
    else:
        for line in plan_text.plan_text(found, disk):
            say(line)
    if not found.asked.fits and found.proposed is None:
        raise typer.Exit(1)
