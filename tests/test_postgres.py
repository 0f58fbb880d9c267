"""tests/postgres.py: which server the tests get, and what is said when there is none."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import postgres
import pytest
from databases import Databases

NOBODY = "postgresql://postgres@127.0.0.1:1/postgres"


def test_a_named_server_that_does_not_answer_is_no_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgres.VARIABLE, NOBODY)
    with pytest.raises(postgres.PostgresError, match=r"AGENTRL_TEST_POSTGRES_URL.*refused") as raised:
        postgres.find_server()
    assert "\n" not in str(raised.value)


def test_a_named_server_comes_before_the_standard_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "fault_of", lambda url: "")
    monkeypatch.setenv(postgres.VARIABLE, NOBODY)
    assert postgres.find_server() == NOBODY
    monkeypatch.delenv(postgres.VARIABLE)
    assert postgres.find_server() == "postgresql://postgres@127.0.0.1:5432/postgres"


def test_without_a_server_postgresql_tests_skip_with_one_plain_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(postgres, "find_server", lambda: None)
    with pytest.raises(pytest.skip.Exception, match="AGENTRL_TEST_POSTGRES_URL"):
        Databases(tmp_path).new("postgresql")
    assert Databases(tmp_path).new("sqlite").startswith("sqlite:///")


def test_without_anything_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "find_server", lambda: None)
    monkeypatch.setattr(postgres, "find_binaries", lambda: None)
    monkeypatch.setattr(postgres, "install", lambda: False)
    with pytest.raises(postgres.PostgresError, match=r"apt install postgresql.*AGENTRL_TEST_POSTGRES_URL"):
        postgres.ensure_server()


def test_a_private_server_is_started_once_and_lets_us_make_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries are installed")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-pg-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr(postgres, "find_server", lambda: None)
    monkeypatch.setattr(postgres, "reachable_folder", lambda: folder / "postgres")
    try:
        url = postgres.ensure_server()
        assert postgres.ensure_server() == url
        assert postgres.fault_of(url) == ""
    finally:
        postgres.Cluster(folder / "postgres", binaries).stop()
        shutil.rmtree(folder)


def test_a_path_too_long_for_a_socket_is_said() -> None:
    with pytest.raises(postgres.PostgresError, match="AGENTRL_CACHE"):
        postgres.Cluster(Path("/tmp") / ("a" * 100), Path("/usr/bin"))
