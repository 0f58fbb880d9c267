"""The scheduler that a run's configuration names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.placement.placed_elsewhere import PLACED_FILE, PlacedElsewhere
from agentrl.placement.ray.ray_placement import RayPlacement
from agentrl.placement.scheduler import Placement


def is_placed_elsewhere(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started by a script or a manifest that also starts the run's task runners."""
    return PLACED_FILE in env


def scheduler_of(run: RunConfig, env: Mapping[str, str] = os.environ) -> Placement:
    """The scheduler that places the processes of a run. Raises ConfigError for a run that this process cannot place."""
    if file := env.get(PLACED_FILE):
        return PlacedElsewhere(Path(file), moves_supervisor=run.placement == "kubernetes")
    if run.placement == "kubernetes":
        raise ConfigError(
            "placement: kubernetes starts nothing from here: apply the manifests of `agentrl render kubernetes`"
        )
    if run.placement == "ray":
        return RayPlacement(run.name, run.run_dir)
    raise ConfigError(f"placement: {run.placement} has no scheduler")
