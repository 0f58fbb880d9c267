"""A run with a curriculum draws the tasks that are always solved less often, at every replica."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from databases import KINDS

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
ADMIN = {"Authorization": "Bearer admin-key"}
GROUPS = 30


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    rollout = {"group_size": 2, "max_concurrent_groups": 10_000, "curriculum": {"target": [0.25, 0.75], "skip": 0.9}}
    return run_config | {"rollout": rollout, "trainer": {"groups_per_step": 10_000}}


@pytest.mark.long_on("postgresql")
def test_solved_tasks_are_drawn_less_often_and_counted(proxy: Any, second: Any) -> None:
    drawn = Counter[int]()
    for number in range(GROUPS):
        opened = (proxy, second)[number % 2].post("/groups").json()
        n = opened["task"]["data"]["n"]
        drawn[n] += 1
        for sample, session in enumerate(opened["sessions"]):
            path = f"/sessions/{session['session_id']}"
            assert proxy.post(f"{path}/reward", {"value": float(n == 0 or sample == 0)}).status_code == 200
            assert proxy.post(f"{path}/end").status_code == 200
    run = proxy.get("/api/run")
    skipped = run["data_cursor"] - GROUPS
    assert skipped > 0
    assert drawn[0] < min(drawn[n] for n in (1, 2, 3)) - 3
    assert drawn[0] + skipped in (drawn[1], drawn[1] + 1, drawn[1] - 1)
    for replica in (proxy, second):
        assert replica.get("/api/status", headers=ADMIN)["run"]["skipped_tasks"] == skipped
        assert f"agentrl_tasks_skipped {skipped}\n" in replica.metrics_text()
