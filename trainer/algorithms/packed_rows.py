"""Sums and means over rows of a packed 1-D tensor.

S: loss tokens, R: rows. A row is the unit of a ratio or mean: a trajectory, or one of its turns. `of_S` holds the row
of each token, in 0..R-1. A row is never cut: all of its loss tokens are here, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """(S,) y_t = x_t + decay · y_{t+1} within each row; tokens of a row are contiguous."""
    out, of = values_S.tolist(), rows.of_S.tolist()
    for t in reversed(range(len(out) - 1)):
        if of[t] == of[t + 1]:
            out[t] += decay * out[t + 1]
    return values_S.new_tensor(out)
