"""The run's settings for model calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agentrl.configs.run_config import RunConfig
from agentrl.domain.experts.routed_experts import RoutingShape
from agentrl.domain.schemas import Json
from agentrl.models import routing_shape

DEFAULT_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """How the calls of every session are answered."""

    sampling: Json  # forced on every session except evaluations
    top_logprobs: int  # how many of the likeliest tokens are kept for each sampled one, except in evaluations
    routing: RoutingShape | None  # record the experts of a model of this shape, except in evaluations
    request_timeout_s: float
    retry_grace_s: float  # how long sampling continues without a client, in case a retry comes
    restore_dropped_text: bool  # put back the text of answers that clients leave out beside tool calls
    clip_max_tokens: bool  # cut `max_tokens` to what the context still holds, in every dialect
    model_aliases: Sequence[str]  # shell patterns of other names of the policy

    @classmethod
    def of(cls, config: RunConfig, base_model: Path) -> Self:
        """The settings of a run's configuration. Raises ModelFolderError when it replays the routing of a model without
        experts.
        """
        return cls(
            sampling=forced_sampling(config),
            top_logprobs=config.rollout.top_logprobs,
            routing=routing_shape(base_model) if config.trainer.routing_replay == "engine" else None,
            request_timeout_s=config.proxy.request_timeout_s,
            retry_grace_s=config.proxy.retry_grace_s,
            restore_dropped_text=config.proxy.restore_dropped_text,
            clip_max_tokens=config.proxy.clip_max_tokens,
            model_aliases=config.proxy.model_aliases,
        )


def forced_sampling(config: RunConfig) -> Json:
    """The sampling settings that override the program's own, in every session except evaluations."""
    own = {"temperature": DEFAULT_TEMPERATURE} if config.steps else {}  # a run that only records changes nothing
    return own | config.rollout.sampling.model_dump(exclude_none=True)
