"""The experts of a merged tree's tokens, against a loop over trajectories and positions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mixtures import random_experts

from agentrl.domain.batching import build_tree
from agentrl.domain.experts.routed_experts import RouteOrigin
from agentrl.trainer.experts.node_routes import node_routes

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5)


@given(ROWS, st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_shared_token_gets_the_first_choice_of_the_best_origin(rows, seed, has_any) -> None:
    rng = np.random.default_rng(seed)
    tree = build_tree([np.array(row, np.int32) for row in rows])
    routed = [
        random_experts(rng, len(row) + 1, rng.integers(0, 3, len(row) + 1)) if has else None
        for row, has in zip(rows, has_any, strict=False)
    ]
    found = node_routes(len(tree), tree.paths, routed)
    assert (found is None) == (not any(has_any[: len(rows)]))
    if found is None:
        return
    disagreements = 0
    for node in range(len(tree)):
        offers = [
            (int(one.origins[at]), one.ids[at])
            for path, one in zip(tree.paths, routed, strict=True)
            for at in np.flatnonzero(path == node)
            if one is not None and one.origins[at] != RouteOrigin.MISSING
        ]
        best = min((origin for origin, _ in offers), default=int(RouteOrigin.MISSING))
        taken = next((ids for origin, ids in offers if origin == best), np.zeros_like(found.experts_NLk[node].numpy()))
        assert int(found.origins_N[node]) == best
        np.testing.assert_array_equal(found.experts_NLk[node].numpy(), taken)
        disagreements += any((ids != taken).any() for _, ids in offers)
    assert found.disagreements == disagreements
