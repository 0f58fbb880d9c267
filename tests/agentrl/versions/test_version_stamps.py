"""A stamp is that of a folder's files as they are, on this host since its boot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.versions import version_stamps
from agentrl.versions.version_stamps import STAMP, is_stamped, stamp_of, write_stamp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_stamp_is_found_again_in_any_order_of_the_files(folder: Path) -> None:
    write_stamp(folder / STAMP, stamp_of(folder, ["a", "b"]))
    assert is_stamped(folder / STAMP, stamp_of(folder, ["b", "a"]))
    assert not is_stamped(folder / STAMP, stamp_of(folder, ["a"]))
    assert sorted(path.name for path in folder.iterdir()) == [STAMP, "a", "b"]


def longer(file: Path) -> None:
    before = file.stat()
    file.write_text("longer")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def later(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def replaced(file: Path) -> None:
    before, other = file.stat(), file.with_name("other")
    other.write_text(file.read_text())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("change", [longer, later, replaced])
def test_a_file_with_another_size_time_or_number_has_another_stamp(folder: Path, change) -> None:
    before = stamp_of(folder, ["a", "b"])
    change(folder / "b")
    assert stamp_of(folder, ["a", "b"]) != before


def test_the_stamp_of_a_file_that_is_gone_cannot_be_taken(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stamp_of(folder, ["a", "c"])


def test_a_stamp_ends_with_the_boot_of_the_host_or_without_one_with_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = set()
    for boot in ("one", "two", None):
        place = folder / "boot"
        place.unlink(missing_ok=True)
        if boot is not None:
            place.write_text(f"{boot}\n")
        monkeypatch.setattr(version_stamps, "BOOT_ID", place)
        stamps.add(stamp_of(folder, ["a"]))
        assert stamp_of(folder, ["a"]) in stamps
    assert len(stamps) == 3
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert stamp_of(folder, ["a"]) not in stamps


def test_what_is_no_stamp_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = stamp_of(folder, ["a"])
    assert not is_stamped(folder / "absent", stamp)
    assert not is_stamped(folder, stamp)
    write_stamp(folder / STAMP, stamp)
    monkeypatch.setattr(version_stamps, "STAMP_BYTES", len(stamp) - 1)
    assert not is_stamped(folder / STAMP, stamp)
