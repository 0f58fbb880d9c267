"""Atomic folders when the disk fails in the middle."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agentrl import files


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "v1-a", Path.rename
    with files.atomic_folder(target) as folder:
        (folder / "file").write_text("old")

    def full(path: Path, to: Path) -> Path:
        if path == draft:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, to)

    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "file").write_text("new")
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        files.settle(draft, target)
    assert (target / "file").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [draft, target]
