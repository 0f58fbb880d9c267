"""The section `metrics`: services that receive the metrics of each step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.configs.section import Section


class WandbConfig(Section):
    """A Weights & Biases run (needs the extra `wandb`, and WANDB_API_KEY or a prior `wandb login`)."""

    project: Annotated[str, Field(min_length=1)]
    """Name of the project."""
    entity: Annotated[str, Field(min_length=1)] | None = None
    """User or team that owns the project; null: your default."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run's folder only, for a later `wandb sync`."""


class TrackioConfig(Section):
    """A trackio run (needs the extra `trackio`)."""

    project: Annotated[str, Field(min_length=1)]
    """Name of the project; `trackio show` displays it."""
    space_id: Annotated[str, Field(min_length=1)] | None = None
    """Hugging Face Space to log to, `USER/SPACE`; null: this machine."""


class MetricsConfig(Section):
    """Where the metrics of each step go, in addition to the store and the terminal."""

    tensorboard: bool = False
    """Write event files to `runs/NAME/tensorboard` (needs the extra `tensorboard`)."""
    wandb: WandbConfig | None = None
    """Weights & Biases; null: off."""
    trackio: TrackioConfig | None = None
    """trackio; null: off."""
