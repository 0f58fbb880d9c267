"""tests/spread.py: what needs the real engine is together, and names of files that are gone are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xdist")  # `-p no:xdist` is fine, an environment without it is too

from spread import ENGINE, REAL_ENGINE, UNDIVIDED, group_of


def test_whatever_uses_the_real_engine_is_in_its_group(request: pytest.FixtureRequest) -> None:
    """Of the tests that were collected with this one: all of them where all are run."""
    users = [i for i in request.session.items if i.get_closest_marker("engine") or "sglang_server" in i.fixturenames]
    assert {group_of(item.nodeid) for item in users} <= {ENGINE}


def test_groups() -> None:
    assert group_of("tests/e2e/test_run.py::test_it") == ENGINE
    assert group_of("tests/agentrl/engine/test_contract.py::test_it[sglang]") == ENGINE
    assert group_of("tests/trainer/test_loop.py::test_it[a::b]") == "tests/trainer/test_loop.py"
    assert (
        group_of("tests/proxy/access/test_authentication.py::test_it[a::b]")
        == "tests/proxy/access/test_authentication.py::test_it[a::b]"
    )


def test_the_paths_are_there() -> None:
    root = Path(__file__).parent.parent
    assert [path for path in REAL_ENGINE + UNDIVIDED if not (root / path).exists()] == []
