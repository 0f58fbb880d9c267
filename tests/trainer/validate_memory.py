"""Compares planned with measured memory: python validate_memory.py FOLDER [CASE…] prints the ratios as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import agentrl.trainer.loop  # noqa: F401  before the tests' folder, which has one of the same name, is on the path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent / "planning"))

from apart import apart
from memory_cases import CASES
from memory_traces import trace_cases
from ranks import run_ranks


def compared(names: list[str], folder: Path) -> dict[str, float]:
    """Predicted over measured peaks."""
    for name in names:
        CASES[name].folder(folder)
    predicted = apart(trace_cases, names, folder)
    measured: dict[str, float] = {}
    for ranks in sorted({CASES[name].ranks for name in names}):
        run_ranks("rank_memory.py", ranks, folder, *[name for name in names if CASES[name].ranks == ranks])
        measured |= json.loads((folder / "measured.json").read_text())
    return {name: predicted[name] / measured[name] for name in names}


if __name__ == "__main__":
    print(json.dumps(compared(sys.argv[2:] or list(CASES), Path(sys.argv[1]))))
