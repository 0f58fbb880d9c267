"""`agentrl.training` outside of a trainer: it supervises the run, and exits with the status of `agentrl train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import agentrl
config = {"name": "r", "model": "tiny", "tasks": "own:tasks", "agent": "own:Absent"}
with agentrl.training(config, ["steps=2"]) as run:
    print("entered the block")
"""


def start(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(text)
    return subprocess.run([sys.executable, "own.py"], cwd=folder, capture_output=True, text=True)


def test_an_error_of_the_run_is_one_line_and_the_block_is_not_entered(tmp_path: Path) -> None:
    done = start(tmp_path, SCRIPT.replace('"agent": "own:Absent"', '"agent": "json:JSONDecodr"'))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "agentrl: agent: 'json' has no 'JSONDecodr'; choose from detect_encoding, dump, dumps, load, loads\n"
    )


def test_a_training_call_without_a_file_is_refused(tmp_path: Path) -> None:
    text = "import agentrl\nwith agentrl.training({'name': 'r', 'model': 'tiny'}): pass"
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("agentrl: agentrl.training: call it from a Python file")
