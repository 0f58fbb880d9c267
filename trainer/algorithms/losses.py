"""The policy loss of an algorithm, assembled from its parts, over one microbatch of packed tokens.

S: loss tokens of one microbatch. Divisors are totals of the whole minibatch, and rows are never cut, so loss and
gradients do not depend on how the batch is cut into microbatches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.aggregation import Totals, token_weights
from agentrl.trainer.algorithms.bounds import k3
from agentrl.trainer.algorithms.clipping import SURROGATES
from agentrl.trainer.algorithms.corrections import behavior_weights
from agentrl.trainer.algorithms.kl import kl_divergence
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.algorithms.ratios import importance_ratio

Sums = dict[str, Tensor]
"""Sums by metric name, 0-dim float64, over loss tokens. `loss` is the microbatch's share of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """Per-token inputs of the loss, all of length S, float unless a comment says otherwise."""

    logprobs_S: Tensor  # log π of the trained policy, with gradient
    proximal_S: Tensor  # log π of the proximal policy, the denominator of ρ
    behavior_S: Tensor  # log π recorded at sampling
    advantages_S: Tensor
    trajectories: Rows
    turns: Rows
    keep_S: Tensor | None = None  # bool; a token with false has policy loss 0 but counts in the means
    counts_S: Tensor | None = None  # bool; a token with false has no loss and does not count in the means
    far_S: Tensor | None = None  # bool; a token with true gets the loss of `kl_cov`
    mean_weight: float = 1.0  # the mean behaviour weight by which weights are divided
    reference_S: Tensor | None = None  # log π of the reference policy
    teacher_S: Tensor | None = None  # log π of the teacher, where it is a part of the advantages; NaN: not taught
    before_S: Tensor | None = None  # log π before the step, where that part is computed from it
    divergence_S: Tensor | None = None  # from the teacher's distribution, with gradient
    entropy_S: Tensor | None = None  # entropy of the token's distribution, with gradient


def policy_loss(tokens: LossTokens, totals: Totals, algorithm: Algorithm) -> tuple[Tensor, Sums]:
    """Σ_t a_t l_t: this microbatch's share of the minibatch's loss, and metrics. a: aggregation, l: `token_losses`."""
    loss_S, sums = token_losses(tokens, algorithm)
    weights_S = token_weights(loss_S, tokens.trajectories, totals, algorithm, tokens.counts_S)
    loss = (weights_S * loss_S).sum()
    return loss, sums | {"loss": loss.detach().double()}


def token_losses(tokens: LossTokens, algorithm: Algorithm) -> tuple[Tensor, Sums]:
    """(S,) w_t L(ρ_t, A_t) + β KL_t + δ D_t − η H_t, and metrics.

    w: behaviour weight (no gradient), L: surrogate, β: `kl_coef` with `kl: loss`, D: divergence from the teacher, δ:
    `distill_coef` with `distill: full`, η: `entropy_coef`.
    """
    of = (tokens.trajectories, tokens.turns)
    ratio_S = importance_ratio(tokens.logprobs_S, tokens.proximal_S, *of, algorithm.ratio, tokens.keep_S)
    weight_S, outside_S = behavior_weights(tokens.proximal_S, tokens.behavior_S, *of, algorithm)
    surrogate = SURROGATES[algorithm.clip]
    loss_S, clipped_S = surrogate(ratio_S, tokens.logprobs_S, tokens.advantages_S, tokens.trajectories, algorithm)
    if tokens.far_S is not None:
        gap_S = (tokens.logprobs_S - tokens.proximal_S).abs()
        loss_S = loss_S + algorithm.kl_cov_coef * torch.where(tokens.far_S, gap_S, 0.0)
    weight_S = weight_S / tokens.mean_weight
    loss_S = weight_S * loss_S
    sums: Sums = {
        "clip_fraction": clipped_S.sum().double(),
        "behavior_weight": weight_S.double().sum(),
        "behavior_weight_capped": outside_S.sum().double(),
        "approx_kl": behavior_kl(tokens).sum(),
    }
    if tokens.keep_S is not None:
        loss_S = torch.where(tokens.keep_S, loss_S, 0.0)
        sums["masked_fraction"] = (~tokens.keep_S).sum().double()
    if algorithm.needs_reference:
        assert tokens.reference_S is not None
        kl_S = kl_divergence(tokens.logprobs_S, tokens.reference_S, algorithm.kl_estimator)
        if algorithm.kl == "loss":
            loss_S = loss_S + algorithm.kl_coef * kl_S
        sums["kl_reference"] = kl_S.detach().double().sum()
    if tokens.teacher_S is not None:
        taught_S = ~tokens.teacher_S.isnan()
        gap_S = (tokens.logprobs_S.detach() - tokens.teacher_S).double()
        sums |= {"kl_teacher": torch.where(taught_S, gap_S, 0.0).sum(), "tokens_taught": taught_S.sum().double()}
    if tokens.divergence_S is not None:
        loss_S = loss_S + algorithm.distill_coef * tokens.divergence_S
        sums["kl_teacher"] = tokens.divergence_S.detach().double().sum()
        sums["tokens_taught"] = torch.ones_like(tokens.divergence_S, dtype=torch.float64).sum()
    if algorithm.entropy_coef:
        assert tokens.entropy_S is not None
        loss_S = loss_S - algorithm.entropy_coef * tokens.entropy_S
    return loss_S, sums


def behavior_kl(tokens: LossTokens) -> Tensor:
    """(S,) k3 estimate of KL(behavior ‖ trained): how far off-policy a token is."""
    return k3((tokens.logprobs_S.detach() - tokens.behavior_S).double())
