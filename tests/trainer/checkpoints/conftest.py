"""A policy after one step."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed_policy import Run

from agentrl.trainer.distributed import World


@pytest.fixture
def run(tiny_model: Path, world: World) -> Run:
    made = Run(tiny_model, world)
    made.step()
    return made
