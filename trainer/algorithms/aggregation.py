"""Aggregates losses of tokens to the loss of a batch: the weight of each token's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.packed_rows import Rows


@dataclass(frozen=True, slots=True)
class Totals:
    """Loss tokens, and trajectories and turns with loss tokens, of a whole minibatch over all microbatches and ranks.
    Turns also count where all of their tokens are masked.
    """

    tokens: float
    sequences: float
    turns: float = 0.0


def token_weights(
    like_S: Tensor, trajectories: Rows, totals: Totals, algorithm: Algorithm, counts_S: Tensor | None = None
) -> Tensor:
    """(S,) the weight of each token's loss, in the dtype of `like_S`. The loss is the weighted sum. A token whose
    `counts_S` (bool) is false has weight 0, and lengths and `totals` are those of the others.

    token_mean     1/Σ|o|. DAPO, arXiv 2503.14476, eq. 8.
    sequence_mean  1/(G |o_i|). GRPO, arXiv 2402.03300, eq. 3.
    sequence_sum   1/G.
    constant       1/(G L). Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    ones_S = like_S.new_ones(len(like_S)) if counts_S is None else counts_S.to(like_S.dtype)
    if algorithm.aggregation == "token_mean":
        return ones_S / max(1.0, totals.tokens)
    each_S = ones_S / max(1.0, totals.sequences)
    if algorithm.aggregation == "sequence_mean":
        return each_S / trajectories.spread(trajectories.sums(ones_S).clamp(min=1))
    if algorithm.aggregation == "sequence_sum":
        return each_S
    if algorithm.aggregation == "constant":
        return each_S / algorithm.aggregation_tokens
    assert_never(algorithm.aggregation)
