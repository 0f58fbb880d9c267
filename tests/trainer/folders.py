"""Small model folders of several kinds, and whether a policy holds what transformers loads from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentrl.trainer.checkpoints import checkpoint_reader
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rope_theta": 5e5}),
    "llama-untied": (
        "Llama",
        {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3-experts": (
        "Qwen3Moe",
        {
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 12,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 44},
    ),
}
"""Name → family of transformers, configuration. The files of the last two hold experts one by one."""


def save_kind(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """A model whose sizes no number of ranks divides; files of at most `shard`."""
    import transformers

    family, settings = KINDS[kind]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    config = getattr(transformers, f"{family}Config")(**(sizes | settings))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def differing(policy: Policy, folder: Path) -> list[str]:
    """Names of parameters and buffers that are not, bit for bit, what transformers loads. Collective."""
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    left, right = (
        dict(lm.named_parameters(remove_duplicate=False)) | dict(lm.named_buffers()) for lm in (expected, policy.lm)
    )
    mine = {name: full(tensor) for name, tensor in right.items()}
    return sorted(n for n in left.keys() | mine.keys() if n not in left or not torch.equal(left[n], mine[n]))


def read_part(folder: Path, part: str, world: World) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's part."""
    tensors = {name: torch.empty(size) for name, size in checkpoint_reader.shapes(folder, part).items()}
    checkpoint_reader.fill(folder, part, tensors, world)
    return tensors
