"""The engines of a run, as its configuration says: the same on this machine and on any host."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from agentrl.configs.run_config import RunConfig
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.prepared.version_host import cache_spec
from agentrl.engine.server_process import pick_device
from agentrl.engine.stored_weights import StoredWeights
from agentrl.models import routing_shape


def engine_seed(seed: int, index: int) -> int:
    """The seed of one engine. Engines get different seeds so that they produce different samples."""
    return zlib.crc32(f"{seed} engine {index}".encode()) & 0x7FFF_FFFF


def engine_spec(run: RunConfig, model: Path, index: int, **place: Any) -> EngineSpec:
    """The server number `index` of a run. `place` gives the fields that depend on its host: port, log_file, gpus, …

    Raises ModelFolderError when the run replays the routing of a model without experts.
    """
    config, lora, size = run.engine, run.trainer.lora, run.resources.engines
    url = run.storage.weights_url(run.name)
    replays = run.trainer.routing_replay == "engine"
    if replays:
        routing_shape(model)
    device = pick_device(config.device)
    settings: dict[str, Any] = {
        "backend": config.backend,
        "model": model,
        "device": device,
        "dtype": config.dtype_on(device),
        "max_total_tokens": config.max_total_tokens,
        "max_running_requests": config.max_running_requests,
        "tensor": size.tensor,
        "pipeline": size.pipeline,
        "data": size.data,
        "experts": size.experts,
        "memory_fraction": config.memory_fraction,
        "context_length": config.context_length,
        "chunked_prefill_tokens": config.chunked_prefill_tokens,
        "attention_backend": config.attention_backend,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
        "seed": engine_seed(run.seed, index),
        "deterministic": config.deterministic,
        "routed_experts": replays,
        "paused_in_place": run.publish.pause == "in_place" and lora.publish != "adapter",
        "lora_rank": lora.rank if lora.publish == "adapter" else 0,
        "lora_targets": tuple(lora.targets),
        "extra_args": tuple(config.extra_args),
        "stored_weights": StoredWeights(url=url, storage=run.storage) if url else None,
        "shadow": run.publish.shadow,
        "version_cache": cache_spec(run.storage),
    }
    return EngineSpec(**(settings | place))
