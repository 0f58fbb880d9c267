"""The importance ratio ρ of the current policy over an older one, at the level of an algorithm."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm import Level
from agentrl.trainer.algorithms.rows import Rows, at_level


def importance_ratio(logprobs_S: Tensor, older_S: Tensor, trajectories: Rows, turns: Rows, level: Level) -> Tensor:
    """(S,) ρ of each token, with the gradient of its level.

    token     π_t/π_old,t. PPO, arXiv 1707.06347, eq. 6.
    sequence  s · π_t/sg(π_t), s = sg((π(y)/π_old(y))^(1/|y|)). GSPO, arXiv 2507.18071, eq. 7, in its token form
              (eq. 14): where the advantage is the same for all tokens of a trajectory, value and gradient are GSPO's;
              where turns differ, each token's gradient still carries its own advantage.
    turn      the same over the tokens of one turn.
    product   π(y)/π_old(y), of the trajectory as one action. RLOO, arXiv 2402.14740.
    """
    log_ratio_S = at_level(logprobs_S - older_S, trajectories, turns, level)
    if level in ("token", "product"):
        return torch.exp(log_ratio_S)
    return torch.exp(log_ratio_S.detach() + logprobs_S - logprobs_S.detach())
