"""Reading the state of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed_policy import Run

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint, checkpoint_reader


def test_a_damaged_state_file_is_named(run: Run, tmp_path: Path) -> None:
    folder = run.begin(tmp_path, copied=False).finish().folder
    (folder / checkpoint.STATE / ".metadata").write_bytes(b"\x80no pickle")
    with pytest.raises(StoreError, match=r"state is damaged"):
        checkpoint_reader.shapes(folder, "policy")
