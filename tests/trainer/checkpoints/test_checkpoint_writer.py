"""Checkpoints that are written while training goes on, and those that cannot be written."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpointed_policy import Run

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_reader, checkpoint_writer
from agentrl.trainer.distributed import World


@pytest.mark.parametrize("copied", [True, False])
def test_a_checkpoint_holds_the_state_of_when_it_was_begun(
    run: Run, tiny_model: Path, world: World, tmp_path: Path, copied: bool
) -> None:
    before = run.state()
    torch.manual_seed(5)
    writing = run.begin(tmp_path, copied=copied)
    drawn = torch.rand(3)
    if copied:
        run.step()
    saved = writing.finish()
    assert not list(tmp_path.glob(".*"))
    other = Run(tiny_model, world)
    checkpoint_reader.load(checkpoint_folders.read(saved.folder), other.policy, other.optimizer, world)
    found = other.state()
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert torch.equal(torch.rand(3), drawn)


@contextmanager
def full_disk(at_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("at_bytes", [100_000, 0])
@pytest.mark.parametrize("copied", [True, False])
def test_a_checkpoint_that_cannot_be_written_raises_and_leaves_no_folder(
    run: Run, tmp_path: Path, copied: bool, at_bytes: int
) -> None:
    with (
        full_disk(at_bytes),
        pytest.raises(StoreError, match=r"step-000001-s cannot be written \(rank 0: .*too large"),
    ):
        run.begin(tmp_path, copied=copied).finish()
    assert checkpoint_folders.newest(tmp_path) == (None, [])


def test_a_full_disk_at_the_end_names_the_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(draft: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_writer, "settle", full)
    with pytest.raises(StoreError, match=r"step-000001-s cannot be written \(rank 0: .*No space left"):
        run.begin(tmp_path, copied=True).finish()


def test_a_folder_that_cannot_be_created_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"step-000001-s cannot be written \(rank 0: .*Not a directory"):
        run.begin(tmp_path / "file", copied=True)
