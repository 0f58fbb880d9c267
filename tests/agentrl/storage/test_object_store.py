"""Objects come back as they were written; a storage that is away is asked again, a bounded number of times."""

from __future__ import annotations

import pytest

from agentrl.errors import DamagedObject, StorageError
from agentrl.storage.object_store import PAUSES_S, ObjectStore


def never(seconds: float) -> None:
    raise AssertionError


def test_objects_are_written_read_listed_and_deleted(store, tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert store.names("a") == []
    store.upload(tmp_path / "file", "a/b/file")
    store.write("a/small", b"123")
    store.download("a/b/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"12345"
    assert store.read("a/small", 3) == b"123"
    assert store.names("a") == ["b", "small"]
    assert store.facts("a/b/file").size_bytes == 5
    store.delete("a")
    store.delete("a")
    assert store.names("a") == []


def test_an_absent_object_is_none_or_an_error(store, tmp_path):
    assert store.read("none", 10) is None
    assert store.facts("none") is None
    with pytest.raises(StorageError, match=r"cannot read .*/none"):
        store.download("none", tmp_path / "back")


def test_a_changed_object_has_another_etag(store):
    store.write("a", b"one")
    before = store.facts("a")
    store.write("a", b"other")
    assert store.facts("a") != before


def test_an_object_that_is_too_large_is_refused(store):
    store.write("a", b"1234")
    with pytest.raises(DamagedObject, match="has 4 bytes; 3 are the most"):
        store.read("a", 3)


def test_a_server_that_is_away_for_some_seconds_is_asked_again(s3, bucket):
    waits: list[float] = []

    def back_at_the_third(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            s3.start()

    store = ObjectStore(bucket, pause=back_at_the_third)
    store.write("a", b"1")
    s3.stop()
    assert store.read("a", 1) == b"1"
    assert waits == list(PAUSES_S[:3])


def test_a_server_that_stays_away_is_one_error_without_keys(s3, bucket):
    waits: list[float] = []
    store = ObjectStore(bucket, pause=waits.append)
    s3.stop()
    try:
        with pytest.raises(StorageError) as refused:
            store.write("a", b"1")
    finally:
        s3.start()
    assert tuple(waits) == PAUSES_S
    assert f"cannot write {bucket}/a: Could not connect" in str(refused.value)
    assert "not-a-real-secret" not in str(refused.value)
    assert "AKIATESTKEY" not in str(refused.value)


def test_an_absent_bucket_and_absent_keys_are_told_at_once(s3, monkeypatch, tmp_path):
    with pytest.raises(StorageError, match=r"cannot write s3://no-such-bucket/a: The specified bucket does not exist"):
        ObjectStore("s3://no-such-bucket", pause=never).write("a", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match="Unable to locate credentials"):
        ObjectStore("s3://bucket", pause=never).write("a", b"1")


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        ObjectStore(f"file://{tmp_path}/file/storage", pause=never).write("a", b"1")


def test_a_part_of_an_object_is_read(store):
    store.write("a", b"0123456789")
    assert store.read_range("a", 2, 5) == b"234"
    assert store.read_range("a", 8, 20) == b"89"
    with pytest.raises(StorageError, match=r"cannot read .*/none"):
        store.read_range("none", 0, 5)
