"""The section `metrics`: services that receive the metrics of each step, samples of rollouts, and spans of sessions."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentrl.configs.section import Positive, Section, plain_address

TRACES_PATH = "/v1/traces"
"""The path of a receiver of spans that is given without one, as OTLP defines it."""


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


class SamplesConfig(Section):
    """A table of rollouts that W&B and trackio show beside the metrics."""

    every: Positive = 10
    """Steps between two tables."""
    count: Annotated[int, Field(ge=1, le=256)] = 8
    """Maximum rollouts of a table."""
    max_text_bytes: Annotated[int, Field(ge=16, le=65536)] = 2000
    """Maximum size of a task, a prompt or an answer in a table; longer ones are cut."""


class TracesConfig(Section):
    """OpenTelemetry spans of ended sessions and their calls, sent to a receiver of OTLP over HTTP (needs the extra
    `otlp`).
    """

    endpoint: str
    """URL that takes the spans, `http://collector:4318/v1/traces`; without a path: `/v1/traces`."""
    headers_env: Annotated[str, Field(min_length=1)] | None = None
    """The proxy's environment variable with headers for the receiver, `NAME=VALUE,NAME=VALUE`, for example its key;
    null: none. The headers themselves are not stored.
    """
    service_name: Annotated[str, Field(min_length=1, max_length=200)] = "agentrl"
    """The attribute `service.name` of the spans."""
    contents: bool = False
    """Send what was said, too: system messages, the new messages of each call, and answers."""
    max_content_bytes: Annotated[int, Field(ge=64, le=1048576)] = 16384
    """Maximum size of the messages in one attribute; longer ones are cut."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Timeout of one request."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_plain_address(cls, value: str) -> str:
        address = plain_address(value, "; use headers_env")
        return address if urlsplit(address).path else address + TRACES_PATH


class MetricsConfig(Section):
    """Where the metrics of each step go, in addition to the store and the terminal."""

    tensorboard: bool = False
    """Write event files to `runs/NAME/tensorboard` (needs the extra `tensorboard`)."""
    wandb: WandbConfig | None = None
    """Weights & Biases; null: off."""
    trackio: TrackioConfig | None = None
    """trackio; null: off."""
    samples: SamplesConfig | None = None
    """Tables of rollouts in W&B and trackio; null: none."""
    traces: TracesConfig | None = None
    """Spans of sessions and calls; null: none."""

    @model_validator(mode="after")
    def _samples_have_a_place(self) -> MetricsConfig:
        if self.samples is not None and self.wandb is None and self.trackio is None:
            raise ValueError("samples: needs `wandb` or `trackio`, which show the tables")
        return self
