"""The section `engine`: the inference servers of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from agentrl.configs.addresses import plain_address
from agentrl.configs.section import Positive, Seconds, Section


class EngineConfig(Section):
    """SGLang servers, started by `agentrl train` or given as `urls`."""

    backend: Literal["sglang"] = "sglang"
    """The inference server of the engines."""
    count: Positive = 1
    """Number of servers to start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA when torch finds a GPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the engines' weights and activations, also for `urls`. Weights are published in this type."""
    max_total_tokens: Positive = 16384
    """Size of the key/value cache, in tokens."""
    max_running_requests: Positive = 64
    """Requests decoded together; further requests wait in the engine's queue."""
    start_timeout_s: Seconds = 300.0
    """Timeout of each start of a server; then the run fails. For `urls`: the run fails if none of them is serving by
    then.
    """
    deterministic: bool = False
    """Sample each call with its own seed, derived from the run's seed, the session's position in the run and the
    prompt. Equal weights then sample equal tokens, whatever else the engine samples. Slower. Servers in `urls` must be
    started with `agentrl engine --deterministic`.
    """
    urls: list[str] = Field(default_factory=list)
    """Existing servers to use instead of starting any. Their keys come from AGENTRL_ENGINE_KEY."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of `sglang.launch_server`."""

    @field_validator("urls")
    @classmethod
    def _are_plain_addresses(cls, value: list[str]) -> list[str]:
        return [plain_address(url, "; use AGENTRL_ENGINE_KEY") for url in value]

    @model_validator(mode="after")
    def _can_be_started(self) -> EngineConfig:
        if not self.urls and self.backend != "sglang":
            raise ValueError(f"agentrl starts only SGLang: backend {self.backend} needs urls")
        return self
