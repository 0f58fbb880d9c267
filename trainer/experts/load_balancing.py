"""How evenly a mixture's routers use its experts: the load-balancing loss, and metrics of the loads.

N: tokens, E: experts, k: experts of a token, R: routers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.trainer.experts.routers import Choice


def load_balancing_loss(choices: Sequence[Choice]) -> Tensor:
    """float32: E · Σ_e f_e · p_e over the choices of all routers, k when all experts are used alike.

    f_e is the mean number of times that a token chooses expert e, p_e the mean probability that routers give it. Switch
    Transformers, arXiv 2101.03961, eqs. 4 to 6, joined over layers as transformers' `load_balancing_loss_func` does it.
    A replayed choice counts as the router's own.
    """
    logits = [choice.logits_NE for choice in choices if choice.logits_NE is not None]
    probabilities_E = torch.stack([logits_NE.softmax(-1).float().sum(0) for logits_NE in logits]).sum(0)
    chosen_E = loads(choices).sum(0).float()
    rows = sum(len(logits_NE) for logits_NE in logits)
    loss: Tensor = len(chosen_E) * (chosen_E / rows * (probabilities_E / rows)).sum()
    return loss


def loads(choices: Sequence[Choice]) -> Tensor:
    """(R, E) int64, how many tokens each router sent to each expert."""
    experts = choices[0].experts
    found_RE = choices[0].experts_Nk.new_zeros((1 + max(choice.router for choice in choices), experts))
    for choice in choices:
        chosen = choice.experts_Nk.flatten()
        found_RE[choice.router].scatter_add_(0, chosen, torch.ones_like(chosen))
    return found_RE


def load_metrics(loads_RE: Tensor) -> dict[str, float]:
    """Metrics of loads, as means over routers; none without any token.

    `routing/load_max`: the largest load divided by the mean load: 1 is even, E / k the most that is possible.
    `routing/load_entropy`: the entropy of the loads divided by ln E: 1 is even.
    `routing/experts_idle`: the share of experts without a token.
    """
    loads_RE = loads_RE.double()
    loads_RE = loads_RE[loads_RE.sum(1) > 0]
    if not len(loads_RE):
        return {}
    shares_RE = loads_RE / loads_RE.sum(1, keepdim=True)
    entropy_R = torch.special.entr(shares_RE).sum(1)
    experts = loads_RE.shape[1]
    return {
        "routing/load_max": float((shares_RE.max(1).values * experts).mean()),
        "routing/load_entropy": float(entropy_R.mean()) / math.log(experts) if experts > 1 else 1.0,
        "routing/experts_idle": float((loads_RE == 0).double().mean()),
    }
