"""The section `engine`: the inference servers of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from agentrl.configs.addresses import plain_address
from agentrl.configs.section import Positive, Seconds, Section


class EngineConfig(Section):
    """SGLang servers that `agentrl train` starts."""

    backend: Literal["sglang"] = "sglang"
    """What the engines are."""
    count: Positive = 1
    """How many servers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where torch sees a GPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights and activations of the engines, of those in `urls` too; what is published to them has it."""
    max_total_tokens: Positive = 16384
    """Key/value cache size, in tokens."""
    max_running_requests: Positive = 64
    """Requests decoded together; more wait in the engine's queue."""
    start_timeout_s: Seconds = 300.0
    """The run fails when any of the servers that it starts does not serve after this long, at each of its starts; of
    those in `urls`, when none does."""
    deterministic: bool = False
    """Sample every call by a seed of its own, made of the run's seed, the session's place in the run and the prompt:
    the same weights then sample the same tokens, whatever else the engine samples. Slower. Servers in `urls` must have
    been started for it (`agentrl engine --deterministic`)."""
    urls: list[str] = Field(default_factory=list)
    """Servers that already run; when given, none is started. Their keys are in AGENTRL_ENGINE_KEY."""
    extra_args: list[str] = Field(default_factory=list)
    """Passed to `sglang.launch_server` as they are."""

    @field_validator("urls")
    @classmethod
    def _are_plain_addresses(cls, value: list[str]) -> list[str]:
        return [plain_address(url, "; use AGENTRL_ENGINE_KEY") for url in value]
