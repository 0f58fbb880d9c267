"""`agentrl render`: prints what a scheduler needs to run a training run, and starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.visible import say

render = typer.Typer(no_args_is_help=True, help="Print a run as a Slurm script or as Kubernetes manifests.")

Config = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, e.g. resources=sglang:d4t2+fsdp:d8.", show_default=False)
]


@render.command()
def slurm(config: Config, overrides: Overrides = None) -> None:
    """Print the script of the Slurm job that `agentrl train CONFIG placement=slurm` submits from this folder."""
    from agentrl.configs.config_files import load_config
    from agentrl.launch.rendered_run import slurm_script

    say(slurm_script(load_config(config, [*(overrides or []), "placement=slurm"])).rstrip("\n"))


@render.command()
def kubernetes(
    config: Config,
    overrides: Overrides = None,
    *,
    image: Annotated[str, typer.Option(help="Image with agentrl, its engine and the agent.")],
    claim: Annotated[str, typer.Option(help="Volume claim that all pods can write; holds `runs_dir`.")],
    mount: Annotated[str, typer.Option(help="Where the pods have the claim; relative paths begin there.")] = "/data",
    claim_size: Annotated[
        str | None, typer.Option(help="Render the claim too, of this size, e.g. 500Gi.", show_default=False)
    ] = None,
    storage_class: Annotated[
        str | None, typer.Option(help="Storage class of a rendered claim.", show_default=False)
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of everything.", show_default=False)] = None,
    secret: Annotated[
        str | None, typer.Option(help="Secret with AGENTRL_DATABASE_URL; default: agentrl-RUN-secrets.")
    ] = None,
    gpu_resource: Annotated[str, typer.Option(help="Name of a GPU in resource limits.")] = "nvidia.com/gpu",
    node_selector: Annotated[
        list[str] | None, typer.Option(help="LABEL=VALUE of the hosts to use; repeat for several.", show_default=False)
    ] = None,
    user: Annotated[int, typer.Option(min=1, help="User and group id of all processes.")] = 10001,
) -> None:
    """Print the manifests of a run, for `kubectl apply -f -`. They hold no secrets."""
    from agentrl.configs.config_files import load_config
    from agentrl.errors import ConfigError
    from agentrl.launch.rendered_run import kubernetes_yaml
    from agentrl.placement.kubernetes.kubernetes_manifests import Target

    selected = [entry.partition("=") for entry in node_selector or []]
    if wrong := [label for label, equals, _ in selected if not equals]:
        raise ConfigError(f"--node-selector {wrong[0]}: must be LABEL=VALUE")
    if storage_class is not None and claim_size is None:
        raise ConfigError("--storage-class needs --claim-size")
    target = Target(
        image=image,
        claim=claim,
        mount=mount,
        namespace=namespace,
        secret=secret,
        gpu_resource=gpu_resource,
        node_selector={label: value for label, _, value in selected},
        claim_size=claim_size,
        storage_class=storage_class,
        user=user,
    )
    run = load_config(config, [*(overrides or []), "placement=kubernetes"])
    say(kubernetes_yaml(run, target).rstrip("\n"))
