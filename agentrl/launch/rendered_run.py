"""A run as text for a scheduler: what `agentrl render` prints."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import yaml

from agentrl.configs.run_config import RunConfig
from agentrl.environment import DATABASE_URL
from agentrl.errors import ConfigError
from agentrl.launch.placed_run import parts_of
from agentrl.launch.slurm_run import placement_of
from agentrl.placement.kubernetes.kubernetes_manifests import Target, manifests, secret_name

HEAD = """# The run {name} on Kubernetes. The claim {claim} is storage that all pods share.
# Model, tasks and agent are there or in the image.
# The database's address is in a Secret, which is not rendered. FILE holds a line {variable}=URL:
#   kubectl create secret generic {secret} --from-env-file=FILE{namespace}
"""


def slurm_script(config: RunConfig) -> str:
    """The script of the run's Slurm job, as `agentrl train` submits it from this folder."""
    return placement_of(config).script(parts_of(config))


def kubernetes_yaml(config: RunConfig, target: Target) -> str:
    """The run's manifests. Raises ConfigError when its folder is not on the claim."""
    runs_dir = PurePosixPath(target.mount) / PurePosixPath(config.runs_dir)
    if PurePosixPath(target.mount) not in (runs_dir, *runs_dir.parents) or ".." in runs_dir.parts:
        raise ConfigError(f"runs_dir: {config.runs_dir} is not below {target.mount}, where the pods have the claim")
    there = config.model_copy(update={"runs_dir": Path(runs_dir), "database_url": None})
    text = yaml.safe_dump(there.model_dump(mode="json", exclude_unset=True), sort_keys=False)
    run_dir = runs_dir / config.name
    found = manifests(config.name, run_dir, text, parts_of(there), target)
    head = HEAD.format(
        name=config.name,
        claim=target.claim,
        secret=secret_name(config.name, target),
        variable=DATABASE_URL,
        namespace=f" --namespace={target.namespace}" if target.namespace else "",
    )
    return head + str(yaml.safe_dump_all(found, sort_keys=False))
