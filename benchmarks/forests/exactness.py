"""The loss and the gradients of a packed forest against those of each path by transformers alone, in float64.

The loss is a weighted sum over the tokens of all paths: −w · log softmax(hidden · embeddingᵀ)[next token].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from forests.shape import model, tree_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.domain.schemas import Int32
from agentrl.trainer.attention import tree_attention
from agentrl.trainer.attention.tree import Tree

CHUNK = 1024


def compare(sequences: list[Int32], window: int | None = None) -> dict[str, float]:
    """Relative differences of the loss and of the gradient, the largest over parameters (‖a − b‖ / ‖b‖)."""
    tree_attention.register()
    lm = model(layers=2, hidden=32, heads=4, groups=2, dtype=torch.float64)
    for layer in lm.layers:
        layer.self_attn.sliding_window = window
    weights = [np.random.default_rng(i).normal(size=len(ids) - 1) for i, ids in enumerate(sequences)]
    packed = _step(lm, lambda: _packed(lm, sequences, weights))
    alone = _step(lm, lambda: sum(_alone(lm, ids, w) for ids, w in zip(sequences, weights, strict=True)))
    gaps = [float((a - b).norm() / b.norm()) for a, b in zip(packed[1], alone[1], strict=True)]
    return {"loss": abs(packed[0] - alone[0]) / abs(alone[0]), "gradient": max(gaps)}


def _step(lm: Any, loss: Any) -> tuple[float, list[Tensor]]:
    lm.zero_grad(set_to_none=True)
    total = loss()
    total.backward()
    return float(total.detach()), [p.grad.clone() for p in lm.parameters()]


def _packed(lm: Any, sequences: list[Int32], weights: list[Any]) -> Tensor:
    lm.set_attn_implementation(tree_attention.SPLIT)
    made = tree_of(sequences)
    tree = Tree(made.ends, made.positions)
    ids = torch.from_numpy(made.token_ids.astype(np.int64))
    positions = torch.from_numpy(made.positions.astype(np.int64))
    hidden_NH = lm(
        input_ids=ids[None], position_ids=positions[None], attention_mask=tree.marker, tree=tree, use_cache=False
    ).last_hidden_state[0]
    paths = [torch.from_numpy(path.astype(np.int64)) for path in made.paths]
    losses = [_loss(lm, hidden_NH[p[:-1]], ids[p[1:]], w) for p, w in zip(paths, weights, strict=True)]
    return torch.stack(losses).sum()


def _alone(lm: Any, sequence: Int32, weight: Any) -> Tensor:
    lm.set_attn_implementation("sdpa")
    ids = torch.from_numpy(sequence.astype(np.int64))
    hidden_TH = lm(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return _loss(lm, hidden_TH[:-1], ids[1:], weight)


def _loss(lm: Any, hidden_TH: Tensor, targets_T: Tensor, weight_T: Any) -> Tensor:
    def part(hidden_CH: Tensor, targets_C: Tensor, weight_C: Tensor) -> Tensor:
        log_p_CV = (hidden_CH @ lm.embed_tokens.weight.t()).log_softmax(-1)
        return -(log_p_CV.gather(-1, targets_C[:, None])[:, 0] * weight_C).sum()

    parts = zip(*(x.split(CHUNK) for x in (hidden_TH, targets_T, torch.from_numpy(weight_T))), strict=True)
    losses: list[Any] = [checkpoint(part, *chunk, use_reentrant=False) for chunk in parts]
    return torch.stack(losses).sum()
