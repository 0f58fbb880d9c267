"""Sizes of groups that do not divide the ranks are refused before any rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.trainer.distributed import World
from agentrl.trainer.parallel.mesh import make_mesh


@pytest.mark.parametrize(
    ("size", "sizes", "says"),
    [
        (8, {"replicas": 2, "tensor": 2, "context": 4}, "replicas × tensor × context of resources.trainer = 2 × 2 × 4"),
        (8, {"experts": 3}, "resources.trainer.experts 3 must divide 8 ranks, and be a multiple of tensor"),
        (8, {"tensor": 4, "experts": 2}, "resources.trainer.experts 2 must divide 8 ranks, and be a multiple of"),
        (8, {"replicas": 2, "experts": 8}, "resources.trainer.experts 8 must divide 4 ranks"),
    ],
)
def test_groups_that_do_not_divide_the_ranks_are_refused(size: int, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_mesh("cpu", size, **sizes)


def test_one_rank_has_no_groups(world: World) -> None:
    mesh = make_mesh("cpu", 1)
    assert mesh.tensor is mesh.context is mesh.experts is mesh.owned is None
    assert (mesh.sharing, mesh.gradient_parts, mesh.spreads_experts) == (1, 1, False)
