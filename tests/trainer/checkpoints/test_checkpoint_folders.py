"""The folders of checkpoints: which are found, and which are kept."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
from checkpointed_policy import Run

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import META, STATE


def test_an_unfinished_checkpoint_is_not_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = threading.Event()
    settle = checkpoint_writer.settle

    def waiting(*folders: Path) -> None:
        assert renamed.wait(60)
        settle(*folders)

    monkeypatch.setattr(checkpoint_writer, "settle", waiting)
    writing = run.begin(tmp_path, copied=True)
    assert checkpoint_folders.newest(tmp_path) == (None, [])
    renamed.set()
    assert writing.finish() == checkpoint_folders.newest(tmp_path)[0]


def test_a_checkpoint_is_known_by_its_digest(run: Run, tmp_path: Path) -> None:
    made = run.begin(tmp_path, copied=False).finish()
    files = [path for path in made.folder.rglob("*") if path.is_file()]
    assert made.digest == hashlib.sha256((made.folder / META).read_bytes()).hexdigest()
    assert made.size_bytes == sum(path.stat().st_size for path in files)
    meta = json.loads((made.folder / META).read_text())
    assert meta["sha256"] == {
        str(path.relative_to(made.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != META
    }
    checkpoint_folders.verify(made)


def test_a_changed_byte_is_found_when_bytes_are_compared(run: Run, tmp_path: Path) -> None:
    made = run.begin(tmp_path, copied=False).finish()
    (state,) = (made.folder / STATE).glob("*.distcp")
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    assert checkpoint_folders.read(made.folder) == made  # sizes are the same
    with pytest.raises(StoreError, match=rf"{STATE}/{state.name} has changed since it was written"):
        checkpoint_folders.verify(made)
    (ignored,) = checkpoint_folders.newest(tmp_path, check=checkpoint_folders.verify)[1]
    assert ignored.folder == made.folder


@pytest.mark.parametrize(
    ("text", "said"), [("[]", "not an object"), ("{", "damaged"), ("{}", "damaged"), (None, "cannot be read")]
)
def test_a_damaged_description_is_named(run: Run, tmp_path: Path, text: str | None, said: str) -> None:
    made = run.begin(tmp_path, copied=False).finish()
    (made.folder / META).unlink()
    if text is not None:
        (made.folder / META).write_text(text)
    with pytest.raises(StoreError, match=said):
        checkpoint_folders.read(made.folder)
