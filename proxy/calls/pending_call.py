"""A model call before it is sampled: its origin, and its request to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.domain.experts.routed_experts import RoutingShape
from agentrl.domain.schemas import Json, Role
from agentrl.proxy.calls.prompts.rendered_prompt import Prompt
from agentrl.proxy.dialects.dialect import Dialect
from agentrl.proxy.dialects.model_request import ModelRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOrigin:
    """The facts of a model call besides its body: its session, and the values of its headers."""

    session_id: str
    dialect: Dialect
    digest: str  # of the request: identifies retries of it
    role: Role | None = None  # x-turn-type
    retry: int = 0  # x-stainless-retry-count
    repeat_key: str | None = None  # hash of its Idempotency-Key
    trains: bool = True  # false: the caller keeps it out of training
    client: str | None = None  # the client library, by its own name


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One answer that a request asks for."""

    id: str
    session_id: str
    request: ModelRequest
    prompt: Prompt
    params: Json
    choice: int  # its index among the request's answers
    created_at: float  # seconds since the epoch, of the request
    trainable: bool  # false in an evaluation session
    top_logprobs: int  # how many of the likeliest tokens are recorded for each sampled one
    routing: RoutingShape | None = None  # record the experts of a model of this shape
    own_seed: int | None = None  # the run's seed for this call; None where its program gave a seed, or engines use none

    @property
    def recorded_params(self) -> Json:
        """The parameters, with the run's seed."""
        return self.params | ({} if self.own_seed is None else {"sampling_seed": self.own_seed})
