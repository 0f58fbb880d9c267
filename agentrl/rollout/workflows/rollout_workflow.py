"""The interface of a workflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from agentrl.domain.schemas import Json
from agentrl.rollout.workflows.model_io import ModelRequest, ModelResponse


class GenerationEngine(Protocol):
    """The engine that a workflow samples with."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer to a prompt of token ids."""


class RewardedInteraction(Protocol):
    """One model call of an episode with its reward; None: no reward of its own."""

    reward: float | None


class RolloutWorkflow(ABC):
    """An episode that works on token ids. Subclasses may be named in `agent:`.

    `arun_episode` returns one of:

    - a dict of arrays or tensors of shape (1, T), or (T,): `input_ids`, `loss_mask` and `rewards` (one number), and
      optionally `attention_mask`, `logprobs`, `versions`. Tokens with `loss_mask` 1 must be tokens that the engine
      sampled in this episode;
    - `{completion_id: interaction}` with the `reward` of each call;
    - None: the episode is rejected, and nothing of it is trained.
    """

    @abstractmethod
    async def arun_episode(
        self, engine: GenerationEngine, data: Json
    ) -> Mapping[str, Any] | Mapping[str, RewardedInteraction] | None:
        """Run one episode of the task `data`."""
