"""scripts/setup-coders: the commands run, in the versions that the locks name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

LOCK = Path(__file__).parents[2] / "requirements" / "coders" / "package-lock.json"


@pytest.mark.parametrize(("command", "package"), [("claude", "@anthropic-ai/claude-code"), ("codex", "@openai/codex")])
def test_a_command_from_npm_has_its_locked_version(coders: Path, command: str, package: str) -> None:
    said = subprocess.run([coders / command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(LOCK.read_text())["packages"][f"node_modules/{package}"]["version"] in said.stdout
