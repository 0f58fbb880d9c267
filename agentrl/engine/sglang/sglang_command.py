"""SGLang's command line and environment."""

from __future__ import annotations

import os
import sys

from agentrl.configs.engine_config import CPU_REQUESTS
from agentrl.configs.trainer_config import ALL_LINEAR
from agentrl.engine.control.preparation import SHADOW_MEMORY
from agentrl.engine.engine_spec import CPU_TOKENS, EngineSpec
from agentrl.engine.prepared.version_host import VERSION_CACHE
from agentrl.engine.stored_weights import STORED_WEIGHTS
from agentrl.environment import ENGINE_KEY, storage_variables, without_secrets
from agentrl.models import linear_layers


def argv(spec: EngineSpec) -> list[str]:
    """SGLang's command line for `spec`. Later arguments win, so `extra_args` can override all others.

    Raises ModelFolderError when the adapters' layers cannot be read from the model's files.
    """
    options = {
        "--model-path": str(spec.model),
        "--host": spec.host,
        "--port": str(spec.port),
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--weight-version": str(spec.weight_version),
    }
    cpu = spec.device == "cpu"
    chosen = {
        "--max-running-requests": spec.max_running_requests or (CPU_REQUESTS if cpu else None),
        "--max-total-tokens": spec.max_total_tokens or (CPU_TOKENS if cpu else None),
        "--random-seed": spec.seed,
        "--attention-backend": spec.attention_backend or ("torch_native" if cpu else None),
        "--tp-size": spec.tensor if spec.tensor > 1 else None,
        "--pp-size": spec.pipeline if spec.pipeline > 1 else None,
        "--dp-size": spec.data if spec.data > 1 else None,
        "--ep-size": spec.experts if spec.experts > 1 else None,
        "--nnodes": spec.hosts if spec.hosts > 1 else None,
        "--node-rank": spec.host_rank if spec.hosts > 1 else None,
        "--dist-init-addr": spec.leader,
        "--mem-fraction-static": spec.memory_fraction,
        "--context-length": spec.context_length,
        "--chunked-prefill-size": spec.chunked_prefill_tokens,
        "--kv-cache-dtype": spec.kv_cache_dtype,
        "--quantization": spec.quantization,
    }
    options |= {name: str(value) for name, value in chosen.items() if value is not None}
    flags = [
        "--incremental-streaming-output",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--constrained-json-disable-any-whitespace",  # else a small model may fill its budget with line breaks
    ]
    if spec.dtype != "float32":
        flags.append("--enable-fp32-lm-head")  # as in the trainer: logprobs from unrounded logits
    if spec.memory_saver and not cpu:
        flags.append("--enable-memory-saver")
    if spec.deterministic:
        flags.append("--enable-deterministic-inference")
    if spec.routed_experts:
        flags.append("--enable-return-routed-experts")
    if spec.paused_in_place:
        flags.append("--disable-overlap-schedule")  # else a batch is computed while it is paused, under two versions
    if spec.lora_rank:
        options["--max-lora-rank"] = str(spec.lora_rank)
        if spec.device == "cpu":
            options["--lora-backend"] = "torch_native"
        flags += ["--enable-lora", "--lora-target-modules", *_lora_targets(spec)]
    pairs = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "agentrl.engine.sglang.keyed_sglang", *pairs, *flags, *spec.extra_args]


def _lora_targets(spec: EngineSpec) -> list[str]:
    if spec.lora_targets == (ALL_LINEAR,):
        return linear_layers(spec.model)
    return sorted({target.rpartition(".")[2] for target in spec.lora_targets})


def environment(spec: EngineSpec) -> dict[str, str]:
    """The inherited environment, offline and without secrets except the key, and the access to an object storage if
    the engine reads versions there. On a CPU also without core binding.
    """
    env = without_secrets(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", SHADOW_MEMORY: spec.shadow}
    if spec.key is not None:
        env[ENGINE_KEY] = spec.key
    if spec.stored_weights is not None:
        env |= storage_variables(os.environ) | {STORED_WEIGHTS: spec.stored_weights.model_dump_json()}
    if spec.version_cache is not None:
        env[VERSION_CACHE] = spec.version_cache.model_dump_json()
    if spec.hosts > 1:
        env["SGLANG_HOST_IP"] = spec.host  # else it asks for the way to an address on the internet
    if spec.device == "cpu":
        env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        env.pop("SGLANG_USE_CPU_ENGINE", None)
        if spec.deterministic:
            env["TORCHDYNAMO_DISABLE"] = "1"  # else SGLang compiles its seeded sampling before the first answer
    elif spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    return env
