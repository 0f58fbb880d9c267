"""The tutorials of the documentation work as they are printed: their files, their commands, the shape of their output.

Only the number of steps is smaller than on the page. The third tutorial looks at the run of the first.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[2] / "scripts" / "tutorial.py"


@pytest.fixture(scope="module")
def tutorial() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tutorial"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def play(tutorial: ModuleType, page: str, folder: Path, replaced: Mapping[str, str]) -> None:
    """Do what the page says, in `folder`; fail where a command fails or does not print what the page shows."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_DATABASE")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    printed = ""
    for block in tutorial.blocks(page, replaced):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(
                command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            printed = done.stdout
            assert done.returncode == 0, f"{page}: {block.text}{printed[-4000:]}"
        elif block.language == "text":
            assert tutorial.missing(block.text, printed) == [], f"{page} shows lines that were not printed:\n{printed}"


@pytest.fixture(scope="module")
def first_run(tutorial: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the first tutorial, played to its end."""
    folder = tmp_path_factory.mktemp("first")
    play(tutorial, "first-agent.md", folder, {"steps: 40 ": "steps: 2 "})
    return folder


def test_your_first_agent(first_run: Path) -> None:
    assert (first_run / "runs" / "first" / "model" / "model.safetensors").exists()


def test_look_at_what_it_learned(tutorial: ModuleType, first_run: Path) -> None:
    play(tutorial, "what-it-learned.md", first_run, {"for _ in range(200)": "for _ in range(20)"})


def test_train_an_agent_you_already_have(tutorial: ModuleType, tmp_path: Path) -> None:
    play(tutorial, "your-agent.md", tmp_path, {"steps: 10\n": "steps: 2\n"})
