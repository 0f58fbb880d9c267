"""A bucket of a real S3 server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from s3_server import S3Server

from agentrl.storage.object_store import ObjectStore


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    yield s3_server
    s3_server.before = lambda request: None
    s3_server.requests.clear()


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """URL of a new, empty bucket."""
    import s3fs

    name = f"bucket-{uuid4().hex[:8]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a storage of each kind."""
    found = request.getfixturevalue("bucket") if request.param == "s3" else f"file://{tmp_path}/storage"
    return f"{found}/pre fix"


@pytest.fixture
def store(url: str) -> ObjectStore:
    return ObjectStore(url, pause=lambda seconds: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files, one of them empty and one in a folder of its own."""
    made = tmp_path / "made"
    (made / "state").mkdir(parents=True)
    (made / "meta.json").write_text("{}")
    (made / "empty").touch()
    (made / "state" / "0.distcp").write_bytes(bytes(range(256)) * 100)
    return made
