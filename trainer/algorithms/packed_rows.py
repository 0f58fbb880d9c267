"""Sums and means over rows of a packed 1-D tensor.

S: loss tokens, R: rows. A row is the unit of a ratio or mean: a trajectory, or one of its turns. `of_S` holds the row
of each token, in 0..R-1. A row is never cut: all of its loss tokens are here, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.configs.algorithm import Level


@dataclass(frozen=True, slots=True)
class Rows:
    """The row of each of S tokens. A row may be empty."""

    of_S: Tensor  # int64
    count: int  # R

    def sums(self, values_S: Tensor) -> Tensor:
        """(R,) sums; 0 for an empty row."""
        return values_S.new_zeros(self.count).index_add(0, self.of_S, values_S)

    def lengths(self, like: Tensor) -> Tensor:
        """(R,) the number of tokens of each row, in the dtype of `like`."""
        return self.sums(like.new_ones(len(self.of_S)))

    def means(self, values_S: Tensor) -> Tensor:
        """(R,) means; 0 for an empty row."""
        return self.sums(values_S) / self.lengths(values_S).clamp(min=1)

    def spread(self, values_R: Tensor) -> Tensor:
        """(S,) the value of each token's row."""
        return values_R[self.of_S]


def at_level(log_ratio_S: Tensor, trajectories: Rows, turns: Rows, level: Level) -> Tensor:
    """(S,) log ratios at a level: the token's own, the mean over its turn or trajectory, or the trajectory's sum."""
    if level == "token":
        return log_ratio_S
    if level == "product":
        return trajectories.spread(trajectories.sums(log_ratio_S))
    rows = {"turn": turns, "sequence": trajectories}[level]
    return rows.spread(rows.means(log_ratio_S))


def suffix_sums(values_S: Tensor, rows: Rows, decay: float) -> Tensor:
    """(S,) y_t = x_t + decay · y_{t+1} within each row; tokens of a row are contiguous.

    Each row is cut into blocks, filled up with zeros. A product with a triangular matrix of powers of `decay` gives the
    sums within blocks; what the blocks behind add is a recurrence of the same kind with decay^block, on as many numbers
    as there are blocks, in log2(blocks of the longest row) steps of doubling.
    """
    if not len(values_S):
        return values_S.clone()
    lengths_R = rows.lengths(rows.of_S)
    lengths_R = lengths_R[lengths_R > 0]
    block = min(LONGEST_BLOCK, 1 << (int(len(values_S) / len(lengths_R)).bit_length() - 1))
    blocks_R = (lengths_R + block - 1) // block
    first_R = torch.cumsum(blocks_R, 0) - blocks_R
    begins_R = torch.cumsum(lengths_R, 0) - lengths_R
    places_S = torch.arange(len(values_S), device=values_S.device)
    places_S = places_S + (block * first_R - begins_R).repeat_interleave(lengths_R)
    blocks_KB = (
        values_S.new_zeros(int(blocks_R.sum()), block).view(-1).index_copy(0, places_S, values_S).view(-1, block)
    )
    ahead_B = torch.arange(block, device=values_S.device)
    powers_BB = torch.tril(values_S.new_tensor(decay) ** (ahead_B[:, None] - ahead_B[None, :]).clamp(min=0))
    sums_KB = blocks_KB @ powers_BB  # (K, B) y within the block: Σ_j x_j decay^(j − i), j ≥ i
    totals_K = _suffix_doubling(sums_KB[:, 0], blocks_R, decay**block)
    behind_K = torch.zeros_like(totals_K)
    goes_on_K = torch.ones(len(totals_K), dtype=torch.bool, device=values_S.device)
    goes_on_K[torch.cumsum(blocks_R, 0) - 1] = False
    behind_K[:-1] = torch.where(goes_on_K[:-1], totals_K[1:], 0.0)
    weights_B = values_S.new_tensor(decay) ** (block - ahead_B)
    return (sums_KB + behind_K[:, None] * weights_B).view(-1)[places_S]


LONGEST_BLOCK = 64


def _suffix_doubling(values_K: Tensor, lengths_R: Tensor, decay: float) -> Tensor:
    """`suffix_sums` of rows with these lengths: after each step a sum covers twice as many numbers."""
    ends_K = torch.cumsum(lengths_R, 0).repeat_interleave(lengths_R)
    at_K = torch.arange(len(values_K), device=values_K.device)
    out_K, covered, longest = values_K, 1, int(lengths_R.max())
    while covered < longest:
        inside_K = at_K + covered < ends_K
        behind_K = torch.where(inside_K, out_K[(at_K + covered).clamp(max=len(out_K) - 1)], 0.0)
        out_K = out_K + decay**covered * behind_K
        covered *= 2
    return out_K
