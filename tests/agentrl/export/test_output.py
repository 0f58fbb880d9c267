"""Output appears whole or not at all."""

import stat
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.export.output import atomic_file, atomic_folder


def test_a_file_appears_when_it_is_complete(tmp_path) -> None:
    out = tmp_path / "deep" / "x"
    with atomic_file(out) as draft:
        draft.write_text("half")
        assert not out.exists()
    assert out.read_text() == "half"
    assert [path.name for path in out.parent.iterdir()] == ["x"]


def test_a_failure_leaves_nothing(tmp_path) -> None:
    def fail(text: str, draft: Path) -> None:
        draft.write_text(text)
        raise RuntimeError

    with pytest.raises(RuntimeError), atomic_file(tmp_path / "x") as draft:
        fail("half", draft)
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "y") as draft:
        fail("half", draft / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_with_force(tmp_path) -> None:
    file, folder = tmp_path / "x", tmp_path / "y"
    for text, force in (("1", False), ("2", True)):
        with atomic_file(file, force=force) as draft:
            draft.write_text(text)
        with atomic_folder(folder, force=force) as draft:
            (draft / text).write_text(text)
    with pytest.raises(UserError, match="exists"), atomic_file(file):
        pass
    with pytest.raises(UserError, match="exists"), atomic_folder(folder):
        pass
    assert file.read_text() == "2"
    assert [path.name for path in folder.iterdir()] == ["2"]
    assert {path.name for path in tmp_path.iterdir()} == {"x", "y"}


def test_an_empty_folder_may_be_filled(tmp_path) -> None:
    (tmp_path / "y").mkdir()
    with atomic_folder(tmp_path / "y") as draft:
        (draft / "a").write_text("1")
    assert (tmp_path / "y" / "a").exists()


def test_a_file_where_a_folder_is_wanted_is_refused(tmp_path) -> None:
    (tmp_path / "x").write_text("")
    (tmp_path / "y").mkdir()
    with pytest.raises(UserError, match="give a folder"), atomic_folder(tmp_path / "x", force=True):
        pass
    with pytest.raises(UserError, match="give a file"), atomic_file(tmp_path / "y", force=True):
        pass


def test_only_the_owner_may_read_what_was_exported(tmp_path) -> None:
    with atomic_file(tmp_path / "x") as draft:
        draft.write_text("")
    with atomic_folder(tmp_path / "y") as draft:
        (draft / "deep").mkdir()
        (draft / "deep" / "z").write_text("")
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"x": 0o600, "y": 0o700, "y/deep": 0o700, "y/deep/z": 0o600}
