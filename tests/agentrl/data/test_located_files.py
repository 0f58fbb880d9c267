"""The files of a source that agentrl cannot or will not read are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.publish_config import StorageConfig
from agentrl.data import located_files
from agentrl.data.located_files import ENDS_BYTES, STATE, Files
from agentrl.errors import UserError


def content(path: Path | str) -> Any:
    with Files(str(path), "tasks", StorageConfig()) as files:
        return files.content


def refused(path: Path | str) -> str:
    with pytest.raises(UserError) as said:
        content(path)
    return str(said.value)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, f"is a folder without {STATE}, so not from `datasets.save_to_disk`"),
        ("{", f"{STATE} cannot be read: JSONDecodeError"),
        ("[]", f"{STATE} cannot be read: TypeError"),
        ("{}", f"{STATE} cannot be read: KeyError('_data_files')"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', f"{STATE} names files outside its folder"),
        (
            '{"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}',
            "has an index, from an old `datasets`: save it again with a newer version",
        ),
        ('{"_data_files": [{"filename": "a.arrow"}]}', "a.arrow: No such file or directory"),
    ],
    ids=["none", "cut", "a list", "empty", "outside", "an index", "a lost file"],
)
def test_a_folder_that_is_no_saved_dataset_is_refused(tmp_path: Path, state: str | None, said: str) -> None:
    if state is not None:
        (tmp_path / STATE).write_text(state)
    assert said in refused(tmp_path)


def test_a_folder_of_several_splits_names_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / STATE).touch()
    assert refused(tmp_path) == f"tasks: {tmp_path} holds several splits: give one of {tmp_path}/test, {tmp_path}/train"


def test_a_pattern_that_matches_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.txt").touch()
    assert refused(f"{tmp_path}/*").startswith(f"tasks: cannot tell what '{tmp_path}/b.txt' is")


def test_a_pattern_matches_files_alone_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    assert refused(f"{tmp_path}/*.jsonl") == f"tasks: no file matches {tmp_path}/*.jsonl"
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    found = [Path(name).name for name, *_ in content(f"{tmp_path}/*.jsonl")["files"]]
    assert found == ["a.jsonl", "b.jsonl"]
    monkeypatch.setattr(located_files, "MAX_FILES", 1)
    assert refused(f"{tmp_path}/*.jsonl") == f"tasks: {tmp_path}/*.jsonl matches 2 files, at most 1 are read"


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
def test_a_change_at_either_end_of_a_file_is_another_content(tmp_path: Path, place: int) -> None:
    file = tmp_path / "t.jsonl"
    text = bytearray(b"x" * 3 * ENDS_BYTES)
    file.write_bytes(text)
    before = content(file)
    text[-place] = ord("y")
    file.write_bytes(text)
    after = content(file)
    assert before != after
    assert [size for _, size, _ in after["files"]] == [3 * ENDS_BYTES]


def test_an_object_of_another_kind_is_refused_before_it_is_downloaded(tmp_path: Path) -> None:
    assert refused(f"file://{tmp_path}/t.txt").startswith(f"tasks: cannot tell what 'file://{tmp_path}/t.txt' is")
