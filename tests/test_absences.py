"""Skips are failures in CI, but for those that are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absences import DELIBERATE, NO_SKIPS, fault, left_out

TESTS = Path(__file__).parent
APART = ("absences.py", "test_absences.py")
SUITE = """
import pytest

@pytest.fixture
def environment():
    pytest.skip("no .venv-agents: run `make setup-agents`")

def test_needs_it(environment):
    pass

@pytest.mark.skipif(True, reason="TRL cannot be imported: run `make setup-trl`")
def test_is_measured_only():
    pass

def test_passes():
    pass
"""


@pytest.mark.parametrize(
    ("value", "outcome"),
    [pytest.param("", "1 passed, 3 skipped", marks=pytest.mark.long), ("1", "1 passed, 1 skipped, 2 errors")],
)
def test_a_suite_without_its_environment_fails_where_nothing_may_skip(tmp_path: Path, value: str, outcome: str) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    command = [sys.executable, "-m", "pytest", "-p", "absences", "--continue-on-collection-errors"]
    env = os.environ | {"PYTHONPATH": str(TESTS), NO_SKIPS: value}
    done = subprocess.run([*command, "-q", str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True)
    *_, summary, last = done.stdout.splitlines()
    assert outcome in summary
    assert last.startswith("left out: 1 tests that need `make setup-") or value
    assert done.returncode == (1 if value else 0)
    said = f"{NO_SKIPS} is set, and this was skipped: "
    assert (f"{said}no .venv-agents: run `make setup-agents`" in done.stdout) == bool(value)
    assert (f"{said}could not import 'no_such_module'" in done.stdout) == bool(value)


def test_every_allowed_absence_is_used_by_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_SKIPS, "1")
    sources = "\n".join(path.read_text() for path in TESTS.rglob("*.py") if path.name not in APART)
    for reason in DELIBERATE:
        assert reason in sources
        assert fault(f"Skipped: {reason}") is None
    assert fault("Skipped: another") == f"{NO_SKIPS} is set, and this was skipped: another"


def test_skipped_tests_are_summarized_in_one_line() -> None:
    agents, peers = "Skipped: no .venv-agents: run `make setup-agents`", "no TRL: run `make setup-trl`"
    assert left_out([agents, agents, peers, "the processor has none"]) == (
        "left out: 2 tests that need `make setup-agents`, 1 tests that need `make setup-trl`"
    )
    assert left_out(["the processor has none"]) == ""


def test_ci_says_that_nothing_may_skip() -> None:
    assert f"export {NO_SKIPS}=1" in (TESTS.parent / ".ci" / "run").read_text()
