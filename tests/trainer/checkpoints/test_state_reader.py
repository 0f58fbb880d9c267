"""Reading the state of a checkpoint that someone else has written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint_reader
from agentrl.trainer.checkpoints.checkpoint import STATE
from agentrl.trainer.checkpoints.checkpoint_tensors import CheckpointTensors
from agentrl.trainer.checkpoints.state_reader import StateReader


class Call:
    """Pickled as the call of a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("read", [checkpoint_reader.shapes, CheckpointTensors])
def test_a_description_that_names_code_is_refused_and_does_not_run_it(tmp_path: Path, read: object) -> None:
    assert callable(read)
    described(tmp_path, Call(tmp_path / "made by the pickle"))
    with pytest.raises(StoreError, match=r"state is damaged: .*it names posix\.mkdir"):
        read(tmp_path, "policy")
    assert not (tmp_path / "made by the pickle").exists()


class OldMember:
    """Pickled as Python 3.11.2 pickles a member of an enumeration."""

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


class Other(OldMember):
    """The same of a class that is no enumeration."""

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (Metadata, "__init__")


def described(folder: Path, planner_data: object) -> Path:
    (folder / STATE).mkdir()
    made = Metadata({}, planner_data=planner_data)
    (folder / STATE / ".metadata").write_bytes(pickle.dumps(made))
    return folder


def test_a_description_that_an_older_python_wrote_is_read(tmp_path: Path) -> None:
    found = StateReader(described(tmp_path, OldMember()) / STATE).read_metadata()
    assert found.planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


def test_a_description_that_asks_for_an_attribute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another class than memory formats"):
        checkpoint_reader.shapes(described(tmp_path, Other()), "policy")


@pytest.mark.parametrize(
    "made",
    [
        Metadata({"policy/w": BytesStorageMetadata()}),
        Metadata(torch.Size([1])),  # type: ignore[arg-type]
        torch.Size([1]),
        {"policy/w": 1},
        [torch.float32, min],
    ],
)
def test_a_description_of_other_things_than_tensors_is_refused(tmp_path: Path, made: object) -> None:
    (tmp_path / STATE).mkdir()
    (tmp_path / STATE / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(StoreError, match="state is damaged"):
        checkpoint_reader.shapes(tmp_path, "policy")
