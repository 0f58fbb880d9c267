"""The limits on the sub-agents of a session: levels, and sessions of all levels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from play import open_group
from session_trees import child

from agentrl.errors import RequestError
from agentrl.store.db import codec
from agentrl.store.sessions import child_sessions


def test_the_levels_of_a_tree_are_limited(db, run_id, limits):
    bounded = replace(limits, max_subagent_depth=2)
    (root, _) = open_group(db, run_id, bounded).session_ids
    below = child(db, child(db, root, bounded), bounded)
    with pytest.raises(RequestError) as refused:
        child(db, below, bounded)
    assert (refused.value.status, refused.value.code) == (422, "subagents_too_deep")
    with pytest.raises(RequestError, match="at most 0 levels"):
        child(db, root, replace(limits, max_subagent_depth=0))


def test_the_sub_agents_of_each_root_are_limited_over_all_levels(db, run_id, limits):
    bounded = replace(limits, max_subagents_per_session=3)
    first, second = open_group(db, run_id, bounded).session_ids
    below = child(db, first, bounded)
    child(db, below, bounded)
    child(db, below, bounded)
    for parent in (first, below):
        with pytest.raises(RequestError) as refused:
            child(db, parent, bounded)
        assert (refused.value.status, refused.value.code) == (422, "too_many_subagents")
    child(db, second, bounded)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("shape", ["deep", "wide"])
def test_the_default_limits_admit_8_levels_and_256_sub_agents(db, run_id, limits, shape):
    (root, _) = open_group(db, run_id, limits).session_ids
    refusals: list[str] = []
    with db.write() as conn:
        parent = root
        for _ in range(1000):
            try:
                (below,) = child_sessions.start_child(conn, parent, limits, codec.new_id(), {}).session_ids
            except RequestError as refused:
                refusals.append(refused.code)
            else:
                parent = below if shape == "deep" else root
    taken = 8 if shape == "deep" else 256
    assert refusals == ["subagents_too_deep" if shape == "deep" else "too_many_subagents"] * (1000 - taken)
