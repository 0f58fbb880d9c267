"""So that tests find what they share, and a second model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import tuning_setup`

from support import save_tiny_model


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Qwen2 with other weights: a policy that is not its reference."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
