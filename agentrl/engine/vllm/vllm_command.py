"""vLLM's command line and environment."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
from pathlib import Path

from agentrl.configs.engine_config import CPU_REQUESTS
from agentrl.engine.engine_spec import CPU_TOKENS, EngineSpec
from agentrl.engine.stored_weights import STORED_WEIGHTS
from agentrl.environment import ENGINE_KEY, storage_variables, without_secrets
from agentrl.errors import UserError

PYTHON = "AGENTRL_VLLM_PYTHON"
"""Variable with the Python of an environment that has vLLM and agentrl."""
CHECKOUT = Path(__file__).parents[3]
CPU_BLOCK = 128
"""Tokens of a block of the key/value cache on a CPU: vLLM's own choice there."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room."""
LORAS = 4
"""Adapters in one batch; calls of further ones wait. Twice as many are kept in memory."""
MAX_LOGPROBS = 64
LEAST_BYTES = 1 << 26
"""A size of the cache, which the number of blocks replaces; with one, vLLM runs no trial on a CPU."""
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}
"""A small model may else fill its budget with line breaks."""
FLAGS = (
    "--enable-scale-out",  # the route of token ids
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)


def argv(spec: EngineSpec) -> list[str]:
    """vLLM's command line for `spec`. Later arguments win, so `extra_args` can override all others.

    Raises UserError for what vLLM engines do not do, and where no vLLM is found.
    """
    _check(spec)
    cpu = spec.device == "cpu"
    options = {
        "--model": str(spec.model),
        "--host": spec.host,
        "--port": str(spec.port),
        "--dtype": spec.dtype,
        "--weight-version": str(spec.weight_version),
        "--seed": str(secrets.randbelow(1 << 31) if spec.seed is None else spec.seed),
        "--generation-config": "vllm",  # no sampling parameters from the model's folder
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": str(MAX_LOGPROBS),
        "--structured-outputs-config": json.dumps(GRAMMARS),
    }
    tokens = spec.max_total_tokens or (CPU_TOKENS if cpu else None)
    chosen = {
        "--max-num-seqs": spec.max_running_requests or (CPU_REQUESTS if cpu else None),
        "--max-model-len": spec.context_length or ("auto" if cpu else None),  # at most what the cache holds
        "--max-num-batched-tokens": spec.chunked_prefill_tokens,
        "--gpu-memory-utilization": spec.memory_fraction,
        "--attention-backend": spec.attention_backend,
        "--kv-cache-dtype": spec.kv_cache_dtype,
        "--quantization": spec.quantization,
        "--tensor-parallel-size": spec.tensor if spec.tensor > 1 else None,
    }
    if tokens is not None:
        block = CPU_BLOCK if cpu else None
        chosen |= {"--block-size": block, "--num-gpu-blocks-override": -(-tokens // (block or 16)) + 1}
    if cpu:
        chosen["--kv-cache-memory-bytes"] = LEAST_BYTES
    options |= {name: str(value) for name, value in chosen.items() if value is not None}
    flags = [*FLAGS, *(["--enforce-eager"] if cpu else [])]  # compilation takes minutes on a CPU
    if spec.lora_rank:
        options["--max-lora-rank"] = str(_room_for(spec.lora_rank))
        flags += ["--enable-lora", "--max-loras", str(LORAS), "--max-cpu-loras", str(2 * LORAS)]
    pairs = [part for option in options.items() for part in option]
    return [vllm_python(), "-m", "agentrl.engine.vllm.keyed_vllm", *pairs, *flags, *spec.extra_args]


def _check(spec: EngineSpec) -> None:
    """Raise UserError for a specification that vLLM engines do not meet."""
    cannot = {
        "resources.engines: vLLM engines are divided by tensor alone": spec.pipeline > 1
        or spec.data > 1
        or spec.experts > 1
        or spec.hosts > 1,
        "engine.deterministic: a vLLM engine's samples depend on what else it computes": spec.deterministic,
        "trainer.routing_replay: vLLM engines report no experts": spec.routed_experts,
        "resources.colocated: vLLM engines do not release their memory; set resources.divide_memory: true": (
            spec.memory_saver
        ),
    }
    if problem := next((problem for problem, found in cannot.items() if found), None):
        raise UserError(f"{problem} (engine.backend: vllm)")


def vllm_python() -> str:
    """The Python that has vLLM: that of AGENTRL_VLLM_PYTHON, this one, or the checkout's `.venv-vllm`.

    Raises UserError when there is none.
    """
    if given := os.environ.get(PYTHON):
        return given
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    own = CHECKOUT / ".venv-vllm" / "bin" / "python"
    if own.exists():
        return str(own)
    raise UserError(
        f"vLLM is not installed: run `make setup-vllm`, or set {PYTHON} to the Python of an environment with vLLM and "
        "agentrl"
    )


def _room_for(rank: int) -> int:
    found = next((room for room in LORA_RANKS if room >= rank), None)
    if found is None:
        raise UserError(f"trainer.lora.rank: vLLM takes adapters of rank {LORA_RANKS[-1]} or less, got {rank}")
    return found


def environment(spec: EngineSpec) -> dict[str, str]:
    """The inherited environment, offline and without secrets except the key, and the access to an object storage if
    the engine reads versions there. On a CPU half of the cores compute, without core binding.
    """
    env = without_secrets(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause the engine and change its weights; our key guards them
    }
    env.pop("VLLM_API_KEY", None)
    if spec.key is not None:
        env[ENGINE_KEY] = spec.key
    if spec.stored_weights is not None:
        env |= storage_variables(os.environ) | {STORED_WEIGHTS: spec.stored_weights.model_dump_json()}
    if spec.lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if spec.device == "cpu":
        threads = str(max(1, (os.cpu_count() or 1) // 2))
        env |= {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    elif spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    return env
