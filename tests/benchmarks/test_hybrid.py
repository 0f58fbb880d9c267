"""The benchmark of hybrid models: packed, one agrees with each sequence alone; without its states it does not."""

from __future__ import annotations

from pathlib import Path

from harness import Report
from hybrid import compare, measure, save, theory

from agentrl.trainer.distributed import World


def test_states_make_the_difference(tmp_path: Path, world: World) -> None:
    report, model = Report("hybrid"), "lfm2"
    folder = save(model, tmp_path)
    compare(report, model, folder, world)
    for what in ("logprobs_apart", "hidden_apart", "gradient_apart"):
        assert report[f"{what}/{model}/packed"].value <= 1e-4
    assert report[f"logprobs_apart/{model}/without_states"].value >= 0.5
    measure(report, model, folder, (4, 2, 3), 1, world)
    assert {f"seconds/{model}/4x2x3/{way}" for way in ("packed", "unpacked")} <= {f.name for f in report.figures}


def test_the_theory_counts_predicting_tokens() -> None:
    assert theory(4, 2, 3) == 12 / 8
