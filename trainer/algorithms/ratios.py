"""The importance ratio ρ of the current policy over an older one, at an algorithm's level."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.configs.algorithm import Level
from agentrl.trainer.algorithms.bounds import bounded_exp
from agentrl.trainer.algorithms.packed_rows import Rows, at_level


def importance_ratio(
    logprobs_S: Tensor, older_S: Tensor, trajectories: Rows, turns: Rows, level: Level, keep_S: Tensor | None = None
) -> Tensor:
    """(S,) ρ of each token, with the gradient of its level; 1 without gradient where `keep_S` (bool) is false.

    token     π_t/π_old,t. PPO, arXiv 1707.06347, eq. 6.
    sequence  s · π_t/sg(π_t), s = sg((π(y)/π_old(y))^(1/|y|)). GSPO, arXiv 2507.18071, eq. 7, in its token form
              (eq. 14). Value and gradient are GSPO's when all tokens of a trajectory have the same advantage; when
              turns differ, each token's gradient has its own advantage.
    turn      the same over the tokens of one turn.
    product   π(y)/π_old(y), with the trajectory as one action. RLOO, arXiv 2402.14740.

    Bounds and `keep_S` apply to log ρ: after `exp`, a masked infinity would still make the gradient NaN (0 · ∞).
    """
    log_ratio_S = at_level(logprobs_S - older_S, trajectories, turns, level)
    if level not in ("token", "product"):
        log_ratio_S = log_ratio_S.detach() + (logprobs_S - logprobs_S.detach())
    if keep_S is not None:
        log_ratio_S = torch.where(keep_S, log_ratio_S, 0.0)
    return bounded_exp(log_ratio_S)
