"""The section `engine`: the inference servers of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.configs.engine_addresses import BackendName, engine_address
from agentrl.configs.section import Positive, Seconds, Section

CPU_REQUESTS = 64
"""What `max_running_requests: null` means on a CPU."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


def default_dtype(device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16"]:
    """The type that `dtype: auto` means for engines and trainer."""
    return "bfloat16" if device == "cuda" else "float32"


class EngineConfig(Section):
    """SGLang servers, started by `agentrl train` or given as `urls`."""

    backend: BackendName = "sglang"
    """The inference server of the engines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA when torch finds a GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the engines' weights and activations, also for `urls`. Weights are published in this type. `auto`:
    `bfloat16` on a GPU, `float32` on a CPU.
    """
    max_total_tokens: Positive | None = None
    """Size of the key/value cache, in tokens; null: 16,384 on a CPU, and what fits in memory_fraction on a GPU."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a GPU's memory for weights and key/value cache; null: the server chooses."""
    context_length: Positive | None = None
    """Longest sequence of tokens; null: the model's."""
    chunked_prefill_tokens: Positive | None = None
    """Tokens of a prompt that are computed at once; null: the server chooses."""
    attention_backend: Annotated[str, Field(pattern=NAME)] | None = None
    """Attention kernels, for example `fa3` or `flashinfer`; null: `torch_native` on a CPU, else the server chooses."""
    kv_cache_dtype: Annotated[str, Field(pattern=NAME)] | None = None
    """Type of the key/value cache, for example `fp8_e4m3`; null: as the activations."""
    quantization: Annotated[str, Field(pattern=NAME)] | None = None
    """Quantization of the weights, for example `fp8`; null: none."""
    max_running_requests: Positive | None = None
    """Requests decoded together; further requests wait in the engine's queue. null: 64 on a CPU, and what the server
    chooses on a GPU.
    """
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
    """Existing servers to use instead of starting any. `vllm+http://HOST:PORT` names the backend of one that is not of
    `backend`. Their keys come from AGENTRL_ENGINE_KEY.
    """
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of `sglang.launch_server`."""

    @field_validator("urls")
    @classmethod
    def _are_plain_addresses(cls, value: list[str]) -> list[str]:
        for text in value:
            engine_address(text, "; use AGENTRL_ENGINE_KEY")
        return [text.rstrip("/") for text in value]

    def dtype_on(self, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16", "float16"]:
        """The type on the engines' device."""
        return default_dtype(device) if self.dtype == "auto" else self.dtype

    @model_validator(mode="after")
    def _can_be_started(self) -> EngineConfig:
        if not self.urls and self.backend != "sglang":
            raise ValueError(f"agentrl starts only SGLang: backend {self.backend} needs urls")
        return self
