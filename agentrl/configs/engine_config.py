"""The section `engine`: the inference servers of a run, and their addresses."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, field_validator

from agentrl.configs.section import Positive, Seconds, Section, plain_address

CPU_REQUESTS = 64
"""What `max_running_requests: null` means on a CPU."""
BackendName = Literal["sglang", "vllm"]
"""A kind of server: a name of `agentrl.engine.backends.BACKENDS`."""
NAMES: tuple[BackendName, ...] = get_args(BackendName)
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


def default_dtype(device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16"]:
    """The type that `dtype: auto` means for engines and trainer."""
    return "bfloat16" if device == "cuda" else "float32"


class EngineAddress(NamedTuple):
    """The URL of an engine, without a trailing slash, and its backend; None: that of the run."""

    url: str
    backend: BackendName | None = None


def engine_address(text: str, instead: str = "") -> EngineAddress:
    """Parse the address of an engine, which may name its backend: `vllm+http://HOST:PORT`.

    Raises ValueError for an unknown backend, an invalid URL, and one with a password.
    """
    prefix, rest = _split(text)
    url = plain_address(rest, instead)
    backend = next((name for name in NAMES if name == prefix), None)
    if prefix is not None and backend is None:
        raise ValueError(f"names the backend {prefix[:40]!r}, but there are {', '.join(NAMES)}")
    return EngineAddress(url, backend)


def engine_url(text: str) -> str:
    """The URL of an address, which is not checked."""
    return _split(text)[1].rstrip("/")


def _split(text: str) -> tuple[str | None, str]:
    prefix, plus, rest = text.partition("+")
    return (prefix, rest) if plus and prefix.isidentifier() else (None, text)


class EngineConfig(Section):
    """Inference servers, started by `agentrl train` or given as `urls`."""

    backend: BackendName = "sglang"
    """The inference server of the engines. `vllm` needs an environment of its own: `make setup-vllm`, or
    AGENTRL_VLLM_PYTHON.
    """
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
    """Attention kernels, for example `fa3` or `flashinfer`; null: the server chooses; SGLang takes
    `torch_native` on a CPU.
    """
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
    """Further arguments of `sglang.launch_server` or `vllm serve`."""

    @field_validator("urls")
    @classmethod
    def _are_plain_addresses(cls, value: list[str]) -> list[str]:
        for text in value:
            engine_address(text, "; use AGENTRL_ENGINE_KEY")
        return [text.rstrip("/") for text in value]

    def dtype_on(self, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16", "float16"]:
        """The type on the engines' device."""
        return default_dtype(device) if self.dtype == "auto" else self.dtype
