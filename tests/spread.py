"""Which tests run in which of pytest-xdist's processes (`make test` starts up to four).

Whatever uses a real SGLang server runs in one process: two servers would starve each other, and a run that is killed on
purpose is best disturbed by nothing of that weight. Files whose fixtures are dear are not divided. Every other test
goes to whichever process is free. xdist's own groups (`--dist loadgroup`) are not used: they are lost with pytest 9.2.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

ENGINE = "engine"
REAL_ENGINE = ("tests/coders/test_real_engine.py", "tests/e2e/", "tests/frameworks/")
UNDIVIDED = (
    "tests/agentrl/rendering/",
    "tests/agentrl/store/audit/test_run_audit.py",
    "tests/agentrl/store/test_damage.py",
    "tests/trainer/",
)


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, one after the other."""
    if nodeid.startswith(REAL_ENGINE) or "[sglang" in nodeid:
        return ENGINE
    return nodeid.split("::")[0] if nodeid.startswith(UNDIVIDED) else nodeid


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out groups, the largest first and single tests last, so that the processes end together."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
