"""tests/spread.py: what needs the real engine is together, and names of files that are gone are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xdist")  # `-p no:xdist` is fine, an environment without it is too

from spread import ADAPTER_ENGINE, ENGINE, OWN_ENGINE, SHARED, UNDIVIDED, group_of

SERVERS = {"sglang_server": ENGINE, "sglang_server_for_adapters": ADAPTER_ENGINE}


def test_the_users_of_a_server_are_in_its_group(request: pytest.FixtureRequest) -> None:
    """Of the tests that were collected with this one: all of them where all are run."""
    for item in request.session.items:
        group = group_of(item.nodeid)
        if used := [SERVERS[name] for name in SERVERS if name in item.fixturenames]:
            assert [group] == used, item.nodeid
        elif item.get_closest_marker("engine"):
            assert group in {*SHARED, *OWN_ENGINE}, item.nodeid


def test_a_test_id_has_its_group() -> None:
    assert group_of("tests/e2e/test_run.py::test_it") == "tests/e2e/test_run.py"
    assert group_of("tests/e2e/test_crash.py::test_it[sqlite]") == ENGINE
    assert group_of("tests/e2e/test_publish.py::TestTwoEngines::test_it") == ENGINE
    assert group_of("tests/agentrl/engine/contract/test_weights_contract.py::test_it[sglang]") == ENGINE
    assert group_of("tests/agentrl/engine/test_adapters.py::test_it[sglang]") == ADAPTER_ENGINE
    assert (
        group_of("tests/agentrl/engine/test_stream.py::test_it[1]") == "tests/agentrl/engine/test_stream.py::test_it[1]"
    )
    assert group_of("tests/trainer/test_loop.py::test_it[a::b]") == "tests/trainer/test_loop.py"
    assert (
        group_of("tests/proxy/access/test_authentication.py::test_it[a::b]")
        == "tests/proxy/access/test_authentication.py::test_it[a::b]"
    )


def test_the_named_paths_exist() -> None:
    root = Path(__file__).parent.parent
    paths = [*OWN_ENGINE, *UNDIVIDED, *(path for paths in SHARED.values() for path in paths)]
    assert [path for path in paths if not (root / path.split("::")[0]).exists()] == []
