"""The section `metrics`: services that get the metrics of every step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.configs.section import Section


class WandbConfig(Section):
    """A run of Weights & Biases (needs the extra `wandb`; the key is in WANDB_API_KEY, or `wandb login` keeps it)."""

    project: Annotated[str, Field(min_length=1)]
    """Its project there."""
    entity: Annotated[str, Field(min_length=1)] | None = None
    """User or team that the project is of; null: your own."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run's folder alone, for `wandb sync`."""


class TrackioConfig(Section):
    """A run of trackio (needs the extra `trackio`)."""

    project: Annotated[str, Field(min_length=1)]
    """Its project; `trackio show` shows it."""
    space_id: Annotated[str, Field(min_length=1)] | None = None
    """Hugging Face Space that it is logged to, `USER/SPACE`; null: this machine."""


class MetricsConfig(Section):
    """Where the metrics of every step go besides the store and the terminal."""

    tensorboard: bool = False
    """Write event files to `runs/NAME/tensorboard` (needs the extra `tensorboard`)."""
    wandb: WandbConfig | None = None
    """Weights & Biases; null: no."""
    trackio: TrackioConfig | None = None
    """trackio; null: no."""
