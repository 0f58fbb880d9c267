"""The policy loss of an algorithm: its parts put together, over one microbatch of packed tokens.

S: loss tokens of one microbatch. What a loss is divided by comes in as totals of the whole minibatch, and rows are
never cut, so that loss and gradients do not depend on how the batch was cut into microbatches and ranks.
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
"""Sums by metric name, 0-dim float64: over loss tokens, but for `loss`, which is the microbatch's share of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """What the loss needs to know of each token; all of one length S, float unless said otherwise."""

    logprobs_S: Tensor  # log π of the policy that is trained, with gradient
    proximal_S: Tensor  # log π of the policy that ρ is against
    behavior_S: Tensor  # log π recorded at sampling
    advantages_S: Tensor
    trajectories: Rows
    turns: Rows
    keep_S: Tensor | None = None  # bool, false: its policy loss is 0 (but it counts in the means)
    reference_S: Tensor | None = None  # log π of the reference policy
    entropy_S: Tensor | None = None  # of the distribution that the token is from, with gradient


def policy_loss(tokens: LossTokens, totals: Totals, algorithm: Algorithm) -> tuple[Tensor, Sums]:
    """Σ_t a_t l_t: this microbatch's share of the minibatch's loss, and metrics. a: aggregation, l: `token_losses`."""
    loss_S, sums = token_losses(tokens, algorithm)
    loss = (token_weights(loss_S, tokens.trajectories, totals, algorithm) * loss_S).sum()
    return loss, sums | {"loss": loss.detach().double()}


def token_losses(tokens: LossTokens, algorithm: Algorithm) -> tuple[Tensor, Sums]:
    """(S,) w_t L(ρ_t, A_t) + β KL_t − η H_t, and metrics.

    w: behaviour weight (no gradient), L: surrogate, β: `kl_coef` with `kl: loss`, η: `entropy_coef`.
    """
    of = (tokens.trajectories, tokens.turns)
    ratio_S = importance_ratio(tokens.logprobs_S, tokens.proximal_S, *of, algorithm.ratio, tokens.keep_S)
    weight_S, outside_S = behavior_weights(tokens.proximal_S, tokens.behavior_S, *of, algorithm)
    loss_S, clipped_S = SURROGATES[algorithm.clip](ratio_S, tokens.logprobs_S, tokens.advantages_S, algorithm)
    loss_S = weight_S * loss_S
    sums: Sums = {
        "clip_fraction": clipped_S.sum().double(),
        "behavior_weight": weight_S.double().sum(),
        "behavior_weight_capped": outside_S.sum().double(),
        "approx_kl": _behavior_kl(tokens).sum(),
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
    if algorithm.entropy_coef:
        assert tokens.entropy_S is not None
        loss_S = loss_S - algorithm.entropy_coef * tokens.entropy_S
    return loss_S, sums


def _behavior_kl(tokens: LossTokens) -> Tensor:
    """(S,) k3 of the behaviour policy from the trained one: how far off-policy a token is."""
    return k3((tokens.logprobs_S.detach() - tokens.behavior_S).double())
