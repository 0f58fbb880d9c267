"""The experts that the engine chose for the tokens of one microbatch, whose trajectories share tokens.

N: distinct tokens of the microbatch, L: decoder layers, k: experts of a token in one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.domain.experts.routed_experts import RoutedExperts, RouteOrigin
from agentrl.domain.schemas import Int32


@dataclass(frozen=True, slots=True)
class NodeRoutes:
    """Chosen experts of N tokens. `disagreements` counts the tokens for which trajectories recorded other experts."""

    experts_NLk: Tensor  # int16; 0 where the origin is MISSING
    origins_N: Tensor  # uint8, RouteOrigin
    disagreements: int

    def split(self, lengths: Sequence[int]) -> list[NodeRoutes]:
        """The routes of consecutive parts."""
        sizes = list(lengths)
        parts = zip(torch.split(self.experts_NLk, sizes), torch.split(self.origins_N, sizes), strict=True)
        return [NodeRoutes(experts, origins, 0) for experts, origins in parts]

    def part(self, take: Callable[[Tensor], Tensor]) -> NodeRoutes:
        """The routes of some of the tokens: `take` maps (N, …) to their rows."""
        return NodeRoutes(take(self.experts_NLk), take(self.origins_N), 0)

    def to(self, device: torch.device) -> NodeRoutes:
        """The same routes on `device`."""
        return NodeRoutes(
            self.experts_NLk.to(device, non_blocking=True),
            self.origins_N.to(device, non_blocking=True),
            self.disagreements,
        )


def node_routes(nodes: int, paths: Sequence[Int32], routed: Sequence[RoutedExperts | None]) -> NodeRoutes | None:
    """The routes of a merged tree of so many `nodes`; `paths[i]` has the node of each used token of trajectory i.

    A token that several trajectories share has one pass, hence one choice: that of the first trajectory that RECORDED
    one, else of the first with a RECOMPUTED one. None when no trajectory has any.
    """
    first = next((one for one in routed if one is not None), None)
    if first is None:
        return None
    experts = np.zeros((nodes, *first.ids.shape[1:]), np.int16)
    origins = np.zeros(nodes, np.uint8)
    differs = np.zeros(nodes, np.bool_)
    for wanted in (RouteOrigin.RECORDED, RouteOrigin.RECOMPUTED):
        for path, one in zip(paths, routed, strict=False):  # a microbatch without trajectories has one path
            if one is None:
                continue
            has = one.origins[: len(path)] == wanted
            here, ids = path[has], one.ids[: len(path)][has].astype(np.int16)
            known = origins[here] != RouteOrigin.MISSING
            differs[here[known]] |= (experts[here[known]] != ids[known]).any((1, 2))
            experts[here[~known]] = ids[~known]
            origins[here[~known]] = wanted
    return NodeRoutes(torch.from_numpy(experts), torch.from_numpy(origins), int(differs.sum()))
