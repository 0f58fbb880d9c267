"""How to launch one server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.configs.trainer_config import ALL_LINEAR
from agentrl.engine.prepared.version_host import CacheSpec
from agentrl.engine.stored_weights import StoredWeights

CPU_TOKENS = 16_384
"""Size of the key/value cache on a CPU, in tokens, where a configuration gives none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """How to launch one server. Base weights are served as version `weight_version`."""

    model: Path
    port: int
    log_file: Path
    backend: str = "sglang"  # a name of BACKENDS
    host: str = "127.0.0.1"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    max_total_tokens: int | None = None  # None: CPU_TOKENS on a CPU; on a GPU the server chooses
    max_running_requests: int | None = None  # None: CPU_REQUESTS on a CPU; on a GPU the server chooses
    tensor: int = 1  # the sizes of `resources.engines`
    pipeline: int = 1
    data: int = 1
    experts: int = 1
    hosts: int = 1  # over which the server is divided; all but host 0 serve no requests
    host_rank: int = 0
    leader: str | None = None  # HOST:PORT at which the hosts meet
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; empty: all
    memory_fraction: float | None = None
    memory_saver: bool = False  # its memory can be released; SGLang does so on a GPU only
    context_length: int | None = None
    chunked_prefill_tokens: int | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    weight_version: int = 0
    seed: int | None = None  # sampling seed, 0 to 2³¹ − 1; None: random
    deterministic: bool = False  # sample by each call's seed, independent of the batch
    routed_experts: bool = False  # report the experts that a mixture chose; only for models with experts
    paused_in_place: bool = False  # publishes pause it with calls in its batch (`publish.pause: in_place`)
    lora_rank: int = 0  # largest rank of adapters that can be loaded; 0: none
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)  # names of the linear layers that adapters may change
    extra_args: tuple[str, ...] = ()
    stored_weights: StoredWeights | None = None  # where versions are that this host has no folder of
    shadow: str = "auto"  # memory of prepared weights on a GPU: `publish.shadow`
    version_cache: CacheSpec | None = None  # this host's cache of prepared versions; None: that of the default settings
    key: str | None = field(default=None, repr=False)  # the key that clients must send; optional on loopback

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{self.host}:{self.port}"
