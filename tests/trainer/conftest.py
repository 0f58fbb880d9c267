"""Fixtures of the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import support`

from loop_setup import Setup
from support import save_tiny_model

from agentrl.trainer.distributed import World


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random Qwen2 with tied embeddings."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with other weights: a policy that is not its reference."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def n_steps() -> int:
    """Of the run that `setup` makes; a module may have another number."""
    return 3


@pytest.fixture
def setup(tmp_path: Path, tiny_model: Path, world: World, n_steps: int) -> Iterator[Setup]:
    """A run whose groups are all played, before a proxy that publishes."""
    s = Setup(tmp_path, tiny_model, world, steps=n_steps)
    with s.proxy:
        yield s
    s.database.close()
