"""benchmarks/environments.py: the recorded rewards of a few episodes are those of each real library."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"hub": "verifiers", "vault": "openenv", "samples": "inspect", "trials": "harbor"}
"""Those that need a Python environment of their own."""


@pytest.mark.parametrize("name", ["puzzles", "games", "walks", "hub", "vault", "samples", "trials"])
def test_recorded_rewards_are_the_librarys(name: str) -> None:
    needed = ENVIRONMENTS.get(name)
    if needed and not (ROOT / f".venv-{needed}" / "bin" / "python").exists():
        pytest.skip(f"no .venv-{needed}: run `make setup-environments`")
    if not needed and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("no reasoning-gym: run `make setup-gyms`")
    if name == "trials" and shutil.which("bwrap") is None:
        pytest.skip("no isolation by bubblewrap: it is not installed")
    command = [sys.executable, "benchmarks/environments.py", name, "--episodes", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: 8 episodes" in done.stdout
    assert "0 episodes differ" in done.stdout
