"""A trainer over a recorded store, killed at random moments and started again, makes the steps of one that was not."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from commanded import Run
from forks import Command
from proxy_stub import play_groups

from agentrl.store.training import steps

STEPS = 8
LOSSES = ("loss", "grad_norm", "entropy", "reward/mean")


def recorded(folder: Path) -> Run:
    """All groups are there: nobody plays any more."""
    run = Run(folder, steps=STEPS, max_staleness=STEPS + 2, lr_schedule="cosine")
    play_groups(run.database, run.run_id, STEPS)
    return run


def curve(run: Run) -> list[tuple[float, ...]]:
    """LOSSES of each surviving step."""
    with run.database.read() as conn:
        return [tuple(s.metrics[name] for name in LOSSES) for s in steps.of_run(conn, run.run_id)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    run = recorded(tmp_path_factory.mktemp("undisturbed"))
    with run.proxy:
        process = run.start()
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = curve(run)
    run.database.close()
    return found


def kill_at_random(process: Command, rng: random.Random, least: int) -> str:
    """kill -9 at some moment after so many steps or one more; what it had said."""
    said, left = "", rng.randint(least, least + 1)
    for line in process.stdout:
        said += line
        if line.startswith("step "):
            left -= 1
        if left < 0:
            break
    time.sleep(rng.uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    return said


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_killed_run_has_the_loss_curve_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[tuple[float, ...]], every: int
) -> None:
    rng = random.Random(every)
    run = recorded(tmp_path)
    with run.proxy:
        for _ in range(2):
            process = run.start(f"trainer.checkpoint_every={every}")
            said = kill_at_random(process, rng, every)
            assert process.returncode in (-signal.SIGKILL, 0), said
        process = run.start(f"trainer.checkpoint_every={every}")
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "resuming after step" in out
    found = curve(run)
    run.database.close()
    assert len(found) == STEPS
    for ours, expected in zip(found, undisturbed, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7)
