"""How many tokens the key/value cache of an engine holds, from a model's config.json and a GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "auto": 2}
"""Bytes of a number by its type."""
DEFAULT_FRACTION = 0.85
"""Share of a GPU's memory for weights and cache that servers choose, about."""
RESERVE = 2 * 2**30
"""Bytes of a GPU beside weights and cache: activations, graphs, the driver."""
STATEFUL = ("linear_attention", "mamba", "recurrent", "conv")
"""Layer types that keep a state for each sequence and no keys for each token."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One engine: tensor × pipeline × data GPUs."""

    weights: float  # bytes on each GPU
    token: float  # bytes of the cache for one token on each GPU
    tokens: int  # that the cache holds, over all copies of the model behind the engine; 0: the weights do not fit

    def episodes(self, tokens: int) -> int:
        """Sequences of so many tokens that the cache holds at once."""
        return self.tokens // max(1, tokens)


def cached_bytes(model: Mapping[str, Any], tensor: int, dtype: str) -> float:
    """Bytes that one token takes in the cache of one of `tensor` GPUs, over all layers.

    Keys and values of each head; with latent attention one vector for all heads, which every GPU keeps. A GPU keeps at
    least one head.
    """
    size, layers = BYTES[dtype], _caching_layers(model)
    if latent := model.get("kv_lora_rank"):
        return float(layers * (latent + (model.get("qk_rope_head_dim") or 0)) * size)
    heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    head_size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return float(layers * 2 * -(-heads // tensor) * head_size * size)


def _caching_layers(model: Mapping[str, Any]) -> int:
    types = model.get("layer_types")
    if isinstance(types, list) and types:
        return sum(not any(kind in str(name) for kind in STATEFUL) for name in types)
    return int(model["num_hidden_layers"])


def engine_memory(
    model: Mapping[str, Any],
    parameters: float,
    gpu_bytes: float,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    fraction: float | None = None,
    taken: float = 0.0,
) -> EngineMemory:
    """The memory of an engine of a model with so many parameters; `taken` bytes of each GPU are somebody else's."""
    weights = parameters * BYTES[dtype] / (tensor * pipeline)
    token = cached_bytes(model, tensor, cache_dtype if cache_dtype in BYTES else dtype) / pipeline
    room = min(gpu_bytes * (fraction or DEFAULT_FRACTION), gpu_bytes - taken - RESERVE) - weights
    return EngineMemory(weights, token, max(0, int(room / token)) * data)


def least_tensor(parameters: float, gpu_bytes: float, gpus: int, dtype: str = "bfloat16", taken: float = 0.0) -> int:
    """The fewest GPUs, a power of two up to `gpus`, whose memory holds the weights and as much cache again as half of
    them; `gpus` where even these do not.
    """
    tensor = 1
    while tensor < gpus and parameters * BYTES[dtype] * 1.5 / tensor > gpu_bytes * DEFAULT_FRACTION - taken:
        tensor *= 2
    return min(tensor, gpus)
