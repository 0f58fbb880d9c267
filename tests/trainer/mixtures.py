"""Small random mixtures of experts, recorded experts of trajectories, and routers that are forced by a plain hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import VOCABULARY, random_samples
from torch import Tensor

from agentrl.domain.experts.routed_experts import RoutedExperts, RouteOrigin
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.packing import Sample

LAYERS, EXPERTS, TOP_K = 3, 8, 3
Weigh = Callable[[Tensor, Tensor], Tensor]


def save_mixture(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """A Qwen3-MoE with random weights, as wide as support.py's model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": LAYERS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | settings
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def random_experts(
    rng: np.random.Generator, rows: int, origins: Sequence[int] | None = None, layers: int = LAYERS
) -> RoutedExperts:
    """Random sets of experts."""
    ids = np.sort(np.argsort(rng.random((rows, layers, EXPERTS)), 2)[..., :TOP_K], 2).astype(np.uint8)
    found = np.full(rows, RouteOrigin.RECORDED, np.uint8) if origins is None else np.array(origins, np.uint8)
    ids[found == RouteOrigin.MISSING] = 0
    return RoutedExperts(ids, found)


def routed_samples(seed: int = 0, missing: float = 0.25) -> list[Sample]:
    """`random_samples` with recorded experts, some MISSING; equal beginnings of a group have equal ones."""
    rng = np.random.default_rng(seed)
    of_prefix: dict[bytes, RoutedExperts] = {}

    def routed(t: TrajectoryTokens) -> RoutedExperts:
        rows = []
        for end in range(1, len(t.input_ids) + 1):
            name = t.group_id.encode() + t.input_ids[:end].tobytes()
            origin = RouteOrigin.MISSING if rng.random() < missing else RouteOrigin.RECORDED
            rows.append(of_prefix.setdefault(name, random_experts(rng, 1, [origin])))
        return RoutedExperts(np.concatenate([r.ids for r in rows]), np.concatenate([r.origins for r in rows]))

    samples = random_samples(seed)
    return [Sample(replace(s.tokens, routed=routed(s.tokens)), s.advantages) for s in samples]


def force(lm: Any, trajectories: Sequence[TrajectoryTokens], *, normalized: bool = True) -> None:
    """Make transformers' routers choose the recorded experts of a padded batch, by forward hooks of our own."""
    lm.set_experts_implementation("eager")  # the grouped product has no float64
    width = max(len(t.input_ids) for t in trajectories)
    ids = np.zeros((len(trajectories), width, LAYERS, TOP_K), np.int64)
    has = np.zeros((len(trajectories), width), np.bool_)
    for i, t in enumerate(trajectories):
        assert t.routed is not None
        ids[i, : len(t.routed)], has[i, : len(t.routed)] = t.routed.ids, t.routed.origins > 0
    has_N = torch.from_numpy(has.reshape(-1))

    def hook_of(layer: int) -> Any:
        given_Nk = torch.from_numpy(ids.reshape(-1, LAYERS, TOP_K)[:, layer])

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            logits_NE, _, own_Nk = output
            chosen_Nk = torch.where(has_N[:, None], given_Nk, own_Nk)
            weights_Nk = logits_NE.softmax(-1).gather(-1, chosen_Nk)
            if normalized:
                weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
            return logits_NE, weights_Nk, chosen_Nk

        return hook

    for layer, block in enumerate(lm.model.layers):
        block.mlp.gate.register_forward_hook(hook_of(layer))
