"""Surrogate losses: the loss of a token from its importance ratio and its advantage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm

Surrogate = Callable[[Tensor, Tensor, Tensor, Algorithm], tuple[Tensor, Tensor]]
"""(ρ, log π, A, algorithm), each (S,) → the losses (S,), and bool (S,) that says which losses the bounds changed."""


def ppo(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """max(−ρA, −clip(ρ, 1−ε_low, 1+ε_high)A); with dual clip c, at most −cA where A < 0.

    PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: arXiv 1912.09729.
    """
    plain_S = -advantages_S * ratio_S
    clipped_S = -advantages_S * ratio_S.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss_S, changed_S = torch.maximum(plain_S, clipped_S), clipped_S > plain_S
    if algorithm.dual_clip is not None:
        bound_S = -algorithm.dual_clip * advantages_S
        beyond_S = (advantages_S < 0) & (loss_S > bound_S)
        loss_S, changed_S = torch.where(beyond_S, bound_S, loss_S), changed_S | beyond_S
    return loss_S, changed_S


def cispo(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """−sg(clip(ρ, 1−ε_low, 1+ε_high)) A log π: every token keeps a gradient. MiniMax-M1, arXiv 2506.13585, eq. 4, 5."""
    weight_S = ratio_S.detach().clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -weight_S * advantages_S * logprobs_S, weight_S != ratio_S.detach()


def sapo(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """−(4/τ) σ(τ(ρ−1)) A, τ by the sign of A: the gradient's weight is at most 1 and fades. SAPO, arXiv 2511.20347."""
    tau_S = torch.full_like(advantages_S, algorithm.sapo_tau_negative)
    tau_S[advantages_S > 0] = algorithm.sapo_tau_positive
    gate_S = torch.sigmoid(tau_S * (ratio_S - 1)) * 4 / tau_S
    return -gate_S * advantages_S, torch.zeros_like(advantages_S, dtype=torch.bool)


def unclipped(ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """−ρA, the importance-weighted policy gradient."""
    return -ratio_S * advantages_S, torch.zeros_like(advantages_S, dtype=torch.bool)


SURROGATES: dict[str, Surrogate] = {"ppo": ppo, "cispo": cispo, "sapo": sapo, "none": unclipped}
"""The surrogate loss for each value of `Algorithm.clip`."""
