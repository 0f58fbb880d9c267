"""A Mooncake store for tests: the fake one, or that of AGENTRL_TEST_MOONCAKE=HOST:PORT through the real package."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.versions.transports import mooncake_source
from agentrl.versions.transports.mooncake_source import MooncakeSource, MooncakeSpec
from agentrl.versions.transports.mooncake_store import MooncakeStore
from tests import fake_mooncake

REAL = os.environ.get("AGENTRL_TEST_MOONCAKE")
SEGMENT_BYTES = 256 << 20


@dataclass
class StoredPlace:
    source: MooncakeSource
    publish: Callable[[Path], None]
    die: Callable[[], None]
    master: fake_mooncake.Master | None


def mooncake_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, prefix: str) -> StoredPlace:
    """An empty store. The real one cannot be made to fail here, so it has no `die`."""
    master = None if REAL else fake_mooncake.install(monkeypatch)
    spec = MooncakeSpec(master=REAL or "127.0.0.1:50051", protocol="tcp", prefix=f"{prefix}-{uuid.uuid4().hex}")
    writer = MooncakeStore(spec, SEGMENT_BYTES)
    request.addfinalizer(writer.close)

    def publish(folder: Path) -> None:
        files = sorted(path.name for path in folder.iterdir() if path.name != "version.json")
        mooncake_source.put_files(writer, spec.prefix, folder, files)
        mooncake_source.put_manifest(writer, spec.prefix, folder)

    def die() -> None:
        assert master is not None
        master.dies_after = 2

    return StoredPlace(MooncakeSource(spec), publish, die, master)


def stored_copy(folder: Path, root: Path) -> None:
    """Copy a version folder below another root."""
    shutil.copytree(folder, root / folder.name)
