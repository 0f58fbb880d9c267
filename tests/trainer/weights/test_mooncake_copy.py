"""Versions that the trainer's ranks put into a Mooncake store, and stores that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.configs.publish_config import MooncakeConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.weights import mooncake_copy
from agentrl.trainer.weights.mooncake_copy import MooncakeCopy
from agentrl.versions.transports.mooncake_source import MooncakeSource, mooncake_spec
from tests import fake_mooncake
from tests.version_folders import tensors, write_version

STORE = MooncakeConfig(master="127.0.0.1:50051", segment_gb=0.5)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> fake_mooncake.Master:
    return fake_mooncake.install(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_version(tmp_path, "v1-a", tensors(np.random.default_rng(0)))
    return tmp_path / "v1-a"


def source() -> MooncakeSource:
    spec = mooncake_spec(STORE, "run")
    assert spec is not None
    return MooncakeSource(spec)


def test_a_run_without_a_store(world: World, folder: Path) -> None:
    copy = MooncakeCopy(None, "run", world)
    assert copy.put(folder) == ""
    copy.remove(lambda names: pytest.fail("asked"))


def test_a_version_is_put_and_removed(master: fake_mooncake.Master, world: World, folder: Path) -> None:
    copy = MooncakeCopy(STORE, "run", world)
    assert copy.put(folder) == ""
    assert master.clients == [("127.0.0.1", 500_000_000)]
    found = source().manifest("v1-a")
    for file in found.files.values():
        pieces = source().read("v1-a", file.name, 0, file.size_bytes)
        assert b"".join(pieces) == (folder / file.name).read_bytes()
    copy.remove(lambda names: set())
    assert master.objects
    copy.remove(lambda names: {"v1-a"} & set(names))
    assert not master.objects
    copy.remove(lambda names: pytest.fail(f"{names}") if names else set())


def test_each_rank_puts_its_share(master: fake_mooncake.Master, world: World, folder: Path) -> None:
    for rank in (0, 1):
        assert MooncakeCopy(STORE, "run", replace(world, rank=rank, size=2))._put_share(folder) == ""
        files = {key.split("/")[3] for key in master.objects}
        assert len(files) == (2, 3)[rank]
    assert source().manifest("v1-a") is None


def test_a_store_that_does_not_answer(master: fake_mooncake.Master, world: World, folder: Path) -> None:
    now = [0.0]
    copy = MooncakeCopy(STORE, "run", world, clock=lambda: now[0])
    master.is_up = False
    assert "setup returned -1" in copy.put(folder)
    master.is_up = True
    assert "did not answer some minutes ago" in copy.put(folder)
    assert not master.objects
    now[0] = mooncake_copy.RETRY_S
    assert copy.put(folder) == ""


def test_a_store_that_fails_later(master: fake_mooncake.Master, world: World, folder: Path) -> None:
    copy = MooncakeCopy(STORE, "run", world)
    copy.put(folder)
    master.is_up = False
    write_version(folder.parent, "v2-b", tensors(np.random.default_rng(1)))
    assert "put returned -900" in copy.put(folder.parent / "v2-b")
    copy.remove(set)  # the store evicts what cannot be removed
    master.is_up = True
    assert source().manifest("v2-b") is None


def test_a_folder_without_a_manifest(master: fake_mooncake.Master, world: World, tmp_path: Path) -> None:
    assert "has no manifest" in MooncakeCopy(STORE, "run", world).put(tmp_path)
