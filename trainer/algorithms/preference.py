"""Losses of preference pairs. A pair is two answers to one prompt, and one of them is preferred. N: pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_losses(margins_N: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(N,) −(1−ε) log σ(βh) − ε log σ(−βh), h = log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l).

    DPO, arXiv 2305.18290, eq. 7. With ε: "conservative DPO" (Mitchell, 2023), for labels that are wrong with
    probability ε.
    """
    return (
        bradley_terry_losses(beta * margins_N) * (1 - label_smoothing) - logsigmoid(-beta * margins_N) * label_smoothing
    )


def ipo_losses(margins_N: Tensor, beta: float) -> Tensor:
    """(N,) (h − 1/(2β))², h as in DPO but with each log-ratio divided by its number of tokens.

    IPO, arXiv 2310.12036, eq. 17, where β is τ. Per token as in the authors' results and in TRL.
    """
    return (margins_N - 1 / (2 * beta)).square()


def bradley_terry_losses(margins_N: Tensor) -> Tensor:
    """(N,) −log σ(r_w − r_l): the reward model of arXiv 2203.02155, eq. 1."""
    return -logsigmoid(margins_N)
