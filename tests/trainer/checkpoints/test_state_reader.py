"""Reading the state of a checkpoint that someone else has written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint_reader
from agentrl.trainer.checkpoints.checkpoint import STATE
from agentrl.trainer.checkpoints.checkpoint_tensors import CheckpointTensors


class Call:
    """Pickled as the call of a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("read", [checkpoint_reader.shapes, CheckpointTensors])
def test_a_description_that_names_code_is_refused_and_does_not_run_it(tmp_path: Path, read: object) -> None:
    assert callable(read)
    (tmp_path / STATE).mkdir()
    made = Metadata({}, planner_data=Call(tmp_path / "made by the pickle"))
    (tmp_path / STATE / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(StoreError, match=r"state is damaged: .*it names posix\.mkdir"):
        read(tmp_path, "policy")
    assert not (tmp_path / "made by the pickle").exists()


@pytest.mark.parametrize(
    "made", [Metadata({"policy/w": BytesStorageMetadata()}), torch.Size([1]), {"policy/w": 1}, [torch.float32, min]]
)
def test_a_description_of_other_things_than_tensors_is_refused(tmp_path: Path, made: object) -> None:
    (tmp_path / STATE).mkdir()
    (tmp_path / STATE / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(StoreError, match="state is damaged"):
        checkpoint_reader.shapes(tmp_path, "policy")
