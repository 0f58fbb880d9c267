"""The environment of coding agents, which tests in this folder need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CODERS = Path(__file__).parents[2] / ".venv-coders" / "bin"


@pytest.fixture(scope="session")
def coders() -> Path:
    """Where `claude`, `codex`, `mini` and `python` are. CI must have it; elsewhere tests are skipped without it."""
    if not (CODERS / "claude").exists():
        missing = "no .venv-coders: run `make setup-coders`"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return CODERS
