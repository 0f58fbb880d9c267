"""Fixtures of the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import support`

from support import save_tiny_model

from agentrl.trainer.distributed import World, join_world


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random Qwen2 with tied embeddings."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """A process group of one rank on the CPU."""
    with join_world("cpu") as w:
        yield w
