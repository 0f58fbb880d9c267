"""Decides which tests run in which of pytest-xdist's processes (`make test` starts up to four), and in which order.

The tests that share a real SGLang server run in one process, one after the other, and so do those of each server that
is a few tests' own. Files with expensive fixtures are not divided. Every other test goes to whichever process is free.
xdist's own groups (`--dist loadgroup`) are not used: they are lost with pytest 9.2.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

ENGINE = "engine"
ADAPTER_ENGINE = "engine with adapters"
SHARED = {
    ENGINE: (
        "tests/agentrl/engine/",
        "tests/e2e/test_crash.py",
        "tests/e2e/test_distribution.py",
        "tests/e2e/test_placed_run.py",
        "tests/e2e/test_publish.py",
        "tests/frameworks/",
        "tests/proxy/test_areal_workflows.py::test_real_sglang",
    ),
    ADAPTER_ENGINE: ("tests/agentrl/engine/test_adapters.py", "tests/e2e/test_adapters.py"),
}
"""Who uses each of the servers that conftest.py shares; in tests/agentrl/ only the tests that say `[sglang`."""
OWN_ENGINE = (
    "tests/e2e/test_run.py",
    "tests/e2e/test_engine_storage.py",
    "tests/e2e/test_publish.py::TestBfloat16Engine",
    "tests/e2e/test_distribution.py::test_logprobs_of_the_demo_model",
    "tests/e2e/test_tuned.py",
    "tests/e2e/test_tutorials.py",
    "tests/agentrl/engine/contract/test_prepared_kill.py::test_a_killed_engine_leaves",
    "tests/agentrl/engine/sglang/test_deterministic.py::test_a_seed",
    "tests/coders/test_real_engine.py",
)
"""Tests that start servers of their own."""
RAY = "tests/agentrl/placement/ray/test_ray_placement.py"
UNDIVIDED = (
    RAY,
    "tests/agentrl/dashboard/test_browser_sign_in.py",
    "tests/agentrl/dashboard/test_every_page.py",
    "tests/agentrl/dashboard/test_hostile_text.py",
    "tests/agentrl/export/test_job.py",
    "tests/agentrl/rendering/",
    "tests/agentrl/storage/test_storage_probe.py",
    "tests/agentrl/storage/test_stored_folders.py",
    "tests/agentrl/store/audit/test_run_audit.py",
    "tests/agentrl/store/db/test_server_faults.py",
    "tests/test_databases.py",
    "tests/trainer/",
)
FIRST = (ENGINE, *OWN_ENGINE, ADAPTER_ENGINE, RAY)
"""Groups that take minutes: they start first, so that the processes end together."""


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, one after the other."""
    if own := [prefix for prefix in OWN_ENGINE if nodeid.startswith(prefix)]:
        return own[0]
    for group in (ADAPTER_ENGINE, ENGINE):
        if nodeid.startswith(SHARED[group]) and ("[sglang" in nodeid or not nodeid.startswith("tests/agentrl/")):
            return group
    return nodeid.split("::")[0] if nodeid.startswith(UNDIVIDED) else nodeid


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out the groups that take minutes, then the largest, and single tests last."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if longest := [group for group in FIRST if group in self.workqueue]:
            self.workqueue.move_to_end(longest[0], last=False)
        super()._assign_work_unit(node)
