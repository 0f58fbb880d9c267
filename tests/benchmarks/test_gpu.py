"""The rehearsal of `make gpu`: parts run in processes of their own, results are kept, deadlines hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def parts(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())["parts"]
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU that is absent")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = gpu(tmp_path / "gpu.json")
    assert done.returncode == 2
    assert "finds no GPU" in done.stdout
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.long
def test_the_quick_parts_are_rehearsed_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = gpu(out, "--rehearse", "--only", "titan", "attention")
    assert done.returncode == 0, done.stdout + done.stderr
    found = parts(out)
    assert {name: one["state"] for name, one in found.items()} == {"titan": "done", "attention": "done"}
    assert found["titan"]["figures"].keys() == {"agentrl/tokens_per_s", "titan/tokens_per_s", "speed"}
    assert len(found["attention"]["figures"]) == 4
    again = gpu(out, "--rehearse", "--only", "titan", "attention", "--again", "attention")
    assert "titan      kept" in again.stdout
    assert parts(out)["titan"] == found["titan"]
    assert parts(out)["attention"]["date"] >= found["attention"]["date"]


@pytest.mark.long
def test_a_part_that_is_late_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = gpu(out, "--rehearse", "--only", "memory", "--deadline", "0.5")
    assert done.returncode == 1
    assert parts(out)["memory"]["state"] == "late"
    assert parts(out)["memory"]["seconds"] < 30


@pytest.mark.long
def test_every_part_without_an_engine_is_rehearsed(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = gpu(out, "--rehearse", "--only", "tests", "trainer", "gains", "memory", "plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {one["state"] for one in parts(out).values()} <= {"done", "absent"}


def test_a_python_without_torch_is_named() -> None:
    script = str(ROOT / "benchmarks" / "gpu.py")
    hidden = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = [{script!r}]; "
    code = hidden + f"runpy.run_path({script!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no torch: pip install" in done.stdout
