"""Profiles of single steps by torch.profiler, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from agentrl.trainer.run.trainer_state import Trainer, say

FOLDER = "profiles"


@contextmanager
def profiled(t: Trainer, step: int) -> Iterator[None]:
    """Profile the block if `trainer.profile_steps` has the step. Each rank writes its own file."""
    if step not in t.config.trainer.profile_steps:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if t.world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        yield
        if t.world.device.type == "cuda":
            torch.cuda.synchronize(t.world.device)
    path = profile_path(t.config.run_dir, step, t.world.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    say(t, f"step {step}: profile in {path.parent}")


def profile_path(run_dir: Path, step: int, rank: int) -> Path:
    """The file of one rank's profile of a step."""
    return run_dir / FOLDER / f"step-{step}-rank-{rank}.json.gz"
