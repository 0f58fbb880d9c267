"""benchmarks/bad_agents.py: beside a few bad agents no good episode fails, and nothing is lost or left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def test_bad_agents_harm_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bad_agents.py", "--quick", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["notes"]["wrong"] == []
    values = {figure["name"]: figure["value"] for figure in result["figures"]}
    assert values["beside_bad/good/completed"] == 60
    assert values["tools/create"] == values["tools/release"] + values["tools/death"]
    assert values["tools/death"] >= 8  # agents that ended their processes
