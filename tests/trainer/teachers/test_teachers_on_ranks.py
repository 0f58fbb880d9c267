"""Teachers on several ranks: each trajectory is asked for once, the step is that of one rank, and an error is all's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from support import save_tiny_model

from agentrl.testing import FakeEngine
from agentrl.trainer.distributed import World

from .taught_steps import CASES, SOURCES, step, trajectories


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_step_of_two_ranks_is_that_of_one(tmp_path: Path, tiny_model: Path, world: World, tensor: int) -> None:
    teacher = save_tiny_model(tmp_path / "teacher", seed=5, hidden_size=48)
    asked = sum(SOURCES[t.group_id] == "sums" for t in trajectories())
    with FakeEngine() as engine:
        alone = {case: step(case, tiny_model, teacher, engine.url, world) for case in CASES}
        assert len(engine.requests) == asked == 8
        engine.clear()
        run_ranks("teachers/taught_steps.py", 2, tiny_model, teacher, engine.url, tmp_path, tensor)
        counts = Counter(tuple(request["input_ids"]) for request in engine.requests)
    assert sum(counts.values()) == asked
    for case, (metrics, gradients) in alone.items():
        found = json.loads((tmp_path / f"{case}.json").read_text())
        for name in ("kl_teacher", "tokens_taught", "tokens_trained", "loss", "entropy"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), (case, name)
        assert 0 < metrics["tokens_taught"] < metrics["tokens_trained"]
        theirs = load_file(tmp_path / f"{case}.safetensors")
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("-inf", "NonFiniteError: trainer.teacher: http://t scored trajectory g1-t1 with -inf"),
        ("prompt", "UserError: no prompt for g1-t1"),
    ],
)
def test_what_fails_on_one_rank_is_the_error_of_all(tmp_path: Path, tiny_model: Path, what: str, expected: str) -> None:
    run_ranks("teachers/rank_lesson_errors.py", 2, tiny_model, tmp_path, what)
    assert [(tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1)] == [expected] * 2
