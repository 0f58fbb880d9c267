"""The files of versions over HTTP: read by engines with a token, sent piece by piece by a trainer."""

import errno
import os
import time

import numpy as np
import pytest
from serving import add_version

from agentrl.versions import version_uploads
from agentrl.versions.http_source import HTTPSource
from agentrl.versions.read_tokens import read_token
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_manifest import VersionManifest
from tests.version_folders import changed, read_tensors, tensors, write_version

ADMIN = {"Authorization": "Bearer admin-key"}


@pytest.fixture
def run_config(run_config, tmp_path):
    return run_config | {"runs_dir": str(tmp_path / "runs")}


@pytest.fixture
def content():
    return tensors(np.random.default_rng(3), 60)


@pytest.fixture
def version(tmp_path, content):
    return write_version(tmp_path / "trainer", "v1-a", content)


def put(proxy, path, data, **headers):
    return proxy.http.put(f"{proxy.url}/versions/{path}", content=data, headers=ADMIN | headers)


def send(proxy, folder, manifest, piece=10_000):
    """Send a version as a trainer does."""
    for name, file in manifest.files.items():
        data = (folder / name).read_bytes()
        for start in range(0, len(data), piece):
            part = data[start : start + piece]
            where = f"bytes {start}-{start + len(part) - 1}/{file.size_bytes}"
            answer = put(proxy, f"{manifest.name}/{name}", part, **{"Content-Range": where})
            assert answer.json() == {"received": start + len(part)}
    return put(proxy, f"{manifest.name}/version.json", manifest.dumps())


def test_what_a_trainer_sent_an_engine_reads(proxy, tmp_path, version, content):
    url = f"{proxy.url}/versions/v1-a/version.json"
    assert proxy.http.head(url, headers=ADMIN).status_code == 404
    sent = send(proxy, tmp_path / "trainer" / "v1-a", version)
    for answer in (sent, put(proxy, "v1-a/version.json", version.dumps())):
        assert (answer.status_code, answer.json()["checksum"]) == (200, version.checksum)
    assert proxy.http.head(url, headers=ADMIN).status_code == 200
    token = read_token("admin-key", "v1-a", int(time.time()) + 60)
    cache = VersionCache(tmp_path / "cache", 1 << 30)
    with cache.whole("v1-a", [HTTPSource(f"{proxy.url}/versions", token)], version.checksum) as folder:
        assert read_tensors(folder) == {name: values.data for name, values in content.items()}


def test_an_interrupted_upload_goes_on_where_it_stopped(proxy, tmp_path, version):
    file = "model-00001-of-00002.safetensors"
    data, url = (tmp_path / "trainer" / "v1-a" / file).read_bytes(), f"{proxy.url}/versions/v1-a/{file}"
    assert put(proxy, f"v1-a/{file}", data[:500]).status_code == 200
    found = proxy.http.head(url, headers=ADMIN)
    assert (found.status_code, found.headers["X-Received"]) == (404, "500")
    again = put(proxy, f"v1-a/{file}", data)
    assert (again.status_code, again.json()["received"]) == (409, 500)
    rest = {"Content-Range": f"bytes 500-{len(data) - 1}/{len(data)}"}
    assert put(proxy, f"v1-a/{file}", data[500:], **rest).json() == {"received": len(data)}
    early = put(proxy, "v1-a/version.json", version.dumps())
    assert early.status_code == 409
    assert "was not sent" in early.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("v1-a/model.safetensors", {"Content-Range": "bytes 3-2/9"}, 422),
        ("v1-a/model.safetensors", {"Content-Range": "bytes 0-9/10"}, 422),  # the body has 3 bytes
        ("v1-a/model.safetensors", {"Content-Range": "bytes 7-9/10"}, 409),
        ("v1-a/model.safetensors", {"Authorization": "Bearer run-key"}, 403),
        ("v1-a/model.safetensors", {"Authorization": "Bearer other"}, 401),
        ("v1-a/.hidden", {}, 422),
        ("latest/model.safetensors", {}, 422),
        ("v1-a/version.json", {}, 409),
    ],
)
def test_pieces_that_are_refused(proxy, path, headers, status):
    assert put(proxy, path, b"abc", **headers).status_code == status


def test_a_piece_is_bounded(proxy, monkeypatch):
    monkeypatch.setattr("agentrl.proxy.routes.weights.version_routes.PIECE_BYTES", 2)
    assert put(proxy, "v1-a/model.safetensors", b"abc").status_code == 413


@pytest.mark.parametrize(
    ("token", "status"),
    [
        ("admin-key", 200),
        (read_token("admin-key", "v1-a", 2**40), 200),
        (read_token("admin-key", "v2-b", 2**40), 200),  # a chain needs its parents
        (read_token("admin-key", "v0-a", 2**40), 401),
        (read_token("admin-key", "v1-a", 1), 401),
        (read_token("other", "v1-a", 2**40), 401),
        ("run-key", 403),
    ],
    ids=["admin", "token", "token of a later version", "of an earlier one", "expired", "of another key", "run key"],
)
def test_who_may_read(proxy, tmp_path, version, token, status):
    send(proxy, tmp_path / "trainer" / "v1-a", version)
    found = proxy.http.get(f"{proxy.url}/versions/v1-a/config.json", headers={"Authorization": f"Bearer {token}"})
    assert found.status_code == status


def test_a_range(proxy, tmp_path, version):
    send(proxy, tmp_path / "trainer" / "v1-a", version)
    data = (tmp_path / "trainer" / "v1-a" / "model-00001-of-00002.safetensors").read_bytes()
    url = f"{proxy.url}/versions/v1-a/model-00001-of-00002.safetensors"
    found = proxy.http.get(url, headers=ADMIN | {"Range": "bytes=100-199"})
    assert (found.status_code, found.content) == (206, data[100:200])


def test_versions_that_no_engine_will_load_any_more_are_deleted(proxy, tmp_path):
    """Three versions are kept, with those that their deltas need."""
    rng, root = np.random.default_rng(5), tmp_path / "trainer"
    known, values = 0, tensors(np.random.default_rng(3), 60)
    made: dict[int, VersionManifest] = {}

    def sent(version, parent=None, name=None):
        nonlocal values, known
        before, values = values, changed(rng, values)
        of = None if parent is None else (made[parent], before)
        made[version] = write_version(root, name or f"v{version}-a", values, of, whole=parent is None)
        while name is None and known < max(version, 5):  # the trainer has completed five steps
            known += 1
            add_version(proxy.database, proxy.run_id, known, root / f"v{known}-a")
        assert send(proxy, root / made[version].name, made[version]).status_code == 200
        there = (tmp_path / "runs").glob("*/weights/v*")
        return sorted(int(path.name[1:].split("-")[0]) for path in there)

    assert sent(1) == [1]
    assert sent(2) == [1, 2]  # it may be sent for a version that follows
    assert sent(3, parent=2) == [2, 3]
    assert sent(4, parent=3) == [2, 3, 4]
    assert sent(5) == [2, 3, 4, 5]
    assert sent(9, name="v9-other") == [2, 3, 4, 5, 9]  # unknown to the store
    assert sent(6) == [2, 3, 4, 5, 6, 9]
    assert sent(7) == [5, 6, 7, 9]


@pytest.mark.parametrize("known", [5, 9])
def test_a_disk_without_room_makes_room_by_deleting_old_versions(proxy, tmp_path, monkeypatch, known):
    """The trainer's next try then works. What the version's delta needs stays, also if a later version needs both."""
    rng, root = np.random.default_rng(5), tmp_path / "trainer"
    values = {0: tensors(np.random.default_rng(3), 60)}
    made: dict[int, VersionManifest] = {}
    for version in range(1, 6):
        values[version] = changed(rng, values[version - 1])
        parent = (made[version - 1], values[version - 1]) if version == 3 else None
        made[version] = write_version(root, f"v{version}-a", values[version], parent, whole=parent is None)
    for version in range(1, known + 1):  # the newest three are needed
        add_version(proxy.database, proxy.run_id, version, root / f"v{version}-a")
    assert put(proxy, "v1-b/model.safetensors", b"an upload that was given up").status_code == 200
    for version in (1, 2):  # no engine will load them
        assert send(proxy, root / f"v{version}-a", made[version]).status_code == 200
    assert put(proxy, "v1-b/model.safetensors", b"an upload that was given up").status_code == 200
    append, (weights,) = version_uploads._append, (tmp_path / "runs").glob("*/weights")

    def full(descriptor, data, size):
        if (weights / "v1-a").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(descriptor, data, size)

    monkeypatch.setattr(version_uploads, "_append", full)
    file = next(iter(made[3].files))
    refused = put(proxy, f"v3-a/{file}", b"piece")
    assert (refused.status_code, "No space left" in refused.text) == (507, True)
    assert {path.name for path in weights.glob("v*")} == {"v2-a"}
    assert not list(weights.glob(".v1*"))
    assert send(proxy, root / "v3-a", made[3]).status_code == 200
