"""`POST /groups` opens as many sessions as the task's success rate asks for, and repeats them with the same keys."""

from __future__ import annotations

from typing import Any

import pytest
from databases import KINDS

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    sizes = {"least": 2, "most": 6, "chance": 0.8}
    rollout = {"group_size": 3, "max_concurrent_groups": 10_000, "adaptive_group": sizes}
    return run_config | {"rollout": rollout, "trainer": {"groups_per_step": 10_000}}


@pytest.mark.long_on("postgresql")
def test_unsolved_tasks_get_larger_groups(proxy: Any) -> None:
    sizes: dict[int, list[int]] = {}
    for number in range(12):
        key = {"Authorization": "Bearer run-key", "Idempotency-Key": f"start-{number}"}
        opened = proxy.post("/groups", headers=key).json()
        again = proxy.post("/groups", headers=key).json()
        assert again["sessions"] == opened["sessions"]
        n = opened["task"]["data"]["n"]
        sizes.setdefault(n, []).append(len(opened["sessions"]))
        for sample, session in enumerate(opened["sessions"]):
            path = f"/sessions/{session['session_id']}"
            reward = float(n != 0 and sample % 2)
            assert proxy.post(f"{path}/reward", {"value": reward}).status_code == 200
            assert proxy.post(f"{path}/end").status_code == 200
    assert all(found[0] == 3 for found in sizes.values())
    assert set(sizes[0][1:]) == {6}
    assert all(set(found[1:]) <= {4, 5} for n, found in sizes.items() if n)
