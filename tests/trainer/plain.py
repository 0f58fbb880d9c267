"""The loss of a batch as a padded tensor program, by transformers and PyTorch alone.

B: trajectories, T: tokens of the longest without its first, which nothing predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.packing import Sample


def load_plain(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Transformers' model, with its own attention. Its norms compute in `dtype`, too, where its own take float32."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for module in lm.modules():
        if type(module).__name__.endswith("RMSNorm"):
            shape, eps = tuple(module.weight.shape), module.variance_epsilon
            module.forward = partial(rms_norm, normalized_shape=shape, weight=module.weight, eps=eps)
    return lm


def padded_logprobs(lm: Any, trajectories: Sequence[TrajectoryTokens]) -> tuple[Tensor, Tensor]:
    """(B, T) log π of every token at its temperature, and the entropy of the distribution that it is from."""
    ids = _padded((t.input_ids for t in trajectories), torch.int64)
    real = _padded((np.ones_like(t.input_ids) for t in trajectories), torch.int64)
    temperatures = _padded((t.temperatures[1:] for t in trajectories), lm.dtype, fill=1.0)
    logits = lm(input_ids=ids, attention_mask=real).logits[:, :-1] / temperatures[..., None]
    every = torch.log_softmax(logits, -1)
    return every.gather(-1, ids[:, 1:, None]).squeeze(-1), -(every.exp() * every).sum(-1)


def padded_loss(lm: Any, samples: Sequence[Sample], algorithm: Algorithm) -> Tensor:
    """−w min(ρA, clip(ρ)A) − η H, w = min(π_prox/π_behave, cap); the mean over tokens, or over those of trajectories.

    ρ is against the behaviour policy or, as in a step's only update, against the policy itself.
    """
    logprobs, entropies = padded_logprobs(lm, [s.tokens for s in samples])
    behavior = _padded((s.tokens.logprobs[1:] for s in samples), lm.dtype)
    advantages = _padded((s.advantages[1:] for s in samples), lm.dtype)
    mask = _padded((s.tokens.loss_mask[1:] for s in samples), lm.dtype)
    proximal = behavior if algorithm.proximal == "behavior" else logprobs.detach()
    weights = torch.exp(proximal - behavior).clamp(max=algorithm.correction_cap)
    ratios = torch.exp(logprobs - proximal)
    clipped = ratios.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    losses = -weights * torch.minimum(ratios * advantages, clipped * advantages)
    losses = (losses - algorithm.entropy_coef * entropies) * mask
    if algorithm.aggregation == "token_mean":
        return losses.sum() / mask.sum()
    return (losses.sum(1) / mask.sum(1)).mean()


def _padded(rows: Iterable[Any], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """(B, longest)"""
    tensors = [torch.from_numpy(row).to(dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
