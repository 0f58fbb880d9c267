"""Version files in a Mooncake store: the order of puts, refusals of the store, and the package's signatures."""

from __future__ import annotations

import inspect
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.configs.publish_config import MooncakeConfig
from agentrl.errors import DamagedObject, StorageError
from agentrl.versions.transports import mooncake_source, mooncake_store
from agentrl.versions.transports.mooncake_source import MooncakeSource, MooncakeSpec, put_files, remove_version
from agentrl.versions.transports.mooncake_store import MooncakeStore, RegisteredBuffer
from agentrl.versions.version_sources import SOURCE_SPECS, open_source
from tests import fake_mooncake
from tests.version_folders import tensors, write_version

SPEC = MooncakeSpec(master="127.0.0.1:50051", protocol="tcp", prefix="agentrl/run")
NAME, FILE = "v1-a", "model-00001-of-00002.safetensors"


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> fake_mooncake.Master:
    monkeypatch.setattr(mooncake_source, "CHUNK_BYTES", 400)
    return fake_mooncake.install(monkeypatch)


@pytest.fixture
def store(master: fake_mooncake.Master) -> MooncakeStore:
    return MooncakeStore(SPEC, 12345, pause=lambda seconds: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_version(tmp_path, NAME, tensors(np.random.default_rng(0), 500))
    return tmp_path / NAME


def plain(signature: str) -> str:
    """A signature without types, names of positions or the address of a default."""
    signature = re.sub(r": [A-Za-z0-9_.\[\], ]+?(?=,| =|\))", "", signature.partition(" ->")[0])
    return re.sub(r"=<[^>]*>", "=None", signature.replace(" = ", "=").replace(", /", ""))


def test_the_fake_has_the_documented_signatures(master: fake_mooncake.Master) -> None:
    client = sys.modules["mooncake.store"].MooncakeDistributedStore
    found = {name: plain(str(inspect.signature(getattr(client, name)))) for name in fake_mooncake.SIGNATURES}
    assert found == fake_mooncake.SIGNATURES


def test_the_package_has_the_documented_signatures() -> None:
    client = pytest.importorskip(
        "mooncake.store", reason="no package for this fabric", exc_type=ImportError
    ).MooncakeDistributedStore
    for name, signature in fake_mooncake.SIGNATURES.items():
        offered = [plain(line) for line in re.findall(rf"{name}(\(self.*)", getattr(client, name).__doc__)]
        assert signature in offered, name


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StorageError, match=r"mooncake://127.0.0.1:50051.*pip install 'agentrl\[mooncake\]'"):
        MooncakeSource(SPEC).manifest(NAME)


def test_a_master_that_does_not_answer(master: fake_mooncake.Master) -> None:
    master.is_up = False
    with pytest.raises(StorageError, match=r"cannot connect to mooncake://127\.0\.0\.1:50051: setup returned -1"):
        MooncakeSource(SPEC).manifest(NAME)


def test_a_master_with_an_unknown_name(master: fake_mooncake.Master, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StorageError, match="cannot connect"):
        MooncakeStore(SPEC)


def test_a_writer_gives_memory_and_a_reader_none(master: fake_mooncake.Master, store: MooncakeStore) -> None:
    MooncakeSource(SPEC).manifest(NAME)
    assert master.clients == [("127.0.0.1", 12345), ("127.0.0.1", 0)]


def test_the_first_part_of_the_manifest_is_put_last(
    master: fake_mooncake.Master, store: MooncakeStore, folder: Path
) -> None:
    put_files(store, SPEC.prefix, folder, [FILE, "config.json"])
    assert MooncakeSource(SPEC).manifest(NAME) is None
    mooncake_source.put_manifest(store, SPEC.prefix, folder)
    keys = list(master.objects)
    assert len([key for key in keys if "version.json" in key]) > 1
    assert keys[-1] == "agentrl/run/v1-a/version.json/0"
    assert all(len(value) <= 400 for value in master.objects.values())


def test_a_file_without_bytes(store: MooncakeStore, folder: Path) -> None:
    (folder / "empty.txt").touch()
    assert put_files(store, SPEC.prefix, folder, ["empty.txt"]) == 0
    assert list(MooncakeSource(SPEC).read(NAME, "empty.txt", 0, 0)) == []


def test_a_part_that_was_evicted(master: fake_mooncake.Master, store: MooncakeStore, folder: Path) -> None:
    put_files(store, SPEC.prefix, folder, [FILE])
    del master.objects[f"agentrl/run/{NAME}/{FILE}/2"]
    with pytest.raises(StorageError, match=f"{NAME}/{FILE} does not exist, or its part 2 was evicted"):
        list(MooncakeSource(SPEC).read(NAME, FILE, 0, 5000))


def test_a_manifest_whose_second_part_was_evicted(
    master: fake_mooncake.Master, store: MooncakeStore, folder: Path
) -> None:
    mooncake_source.put_manifest(store, SPEC.prefix, folder)
    del master.objects[f"agentrl/run/{NAME}/version.json/1"]
    with pytest.raises(DamagedObject, match=NAME):
        MooncakeSource(SPEC).manifest(NAME)


def test_an_object_that_is_larger_than_a_part(master: fake_mooncake.Master, store: MooncakeStore) -> None:
    master.objects[f"agentrl/run/{NAME}/{FILE}/0"] = b"x" * 401
    with pytest.raises(DamagedObject, match="has 401 bytes; 400 are the most"):
        list(MooncakeSource(SPEC).read(NAME, FILE, 0, 10))


def test_a_store_that_is_full_for_a_while(master: fake_mooncake.Master, store: MooncakeStore) -> None:
    master.full_answers = mooncake_store.FULL_TRIES - 1
    store.put("key", b"value")
    assert master.objects["key"] == b"value"


def test_a_store_that_stays_full(master: fake_mooncake.Master, store: MooncakeStore, folder: Path) -> None:
    master.full_answers = mooncake_store.FULL_TRIES
    with pytest.raises(StorageError, match=r"cannot write mooncake://127\.0\.0\.1:50051/agentrl.*put returned -200"):
        put_files(store, SPEC.prefix, folder, [FILE])


def test_a_master_that_dies_while_files_are_put(
    master: fake_mooncake.Master, store: MooncakeStore, folder: Path
) -> None:
    master.is_up = False
    with pytest.raises(StorageError, match="put returned -900"):
        put_files(store, SPEC.prefix, folder, [FILE])
    with pytest.raises(StorageError, match="remove_by_regex returned -900"):
        remove_version(store, SPEC.prefix, NAME)


def test_a_folder_that_is_gone(store: MooncakeStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        put_files(store, SPEC.prefix, tmp_path / "v9-z", [FILE])


def test_a_version_is_removed_alone(master: fake_mooncake.Master, store: MooncakeStore) -> None:
    for name in ("agentrl/run/v1-a/x/0", "agentrl/run/v1-aa/x/0", "agentrl/runs/v1-a/x/0", "agentrl-run/v1-a/x/0"):
        store.put(name, b"x")
    remove_version(store, SPEC.prefix, "v1-a")
    assert list(master.objects) == ["agentrl/run/v1-aa/x/0", "agentrl/runs/v1-a/x/0", "agentrl-run/v1-a/x/0"]


def test_memory_is_registered_only_while_it_is_read_into(
    master: fake_mooncake.Master, store: MooncakeStore, folder: Path
) -> None:
    put_files(store, SPEC.prefix, folder, [FILE])
    pieces = MooncakeSource(SPEC).read(NAME, FILE, 0, 5000)
    next(pieces)
    assert list(master.registered.values()) == [400]
    pieces.close()
    assert not master.registered


def test_memory_that_cannot_be_registered(master: fake_mooncake.Master, store: MooncakeStore) -> None:
    store.close()
    with pytest.raises(StorageError, match="cannot use 10 bytes of memory"), RegisteredBuffer(store, 10):
        pytest.fail("registered")


def test_a_specification_in_json() -> None:
    (spec,) = SOURCE_SPECS.validate_json(SOURCE_SPECS.dump_json([SPEC]))
    assert spec == SPEC
    assert str(open_source(spec)) == "mooncake://127.0.0.1:50051/agentrl/run"


@pytest.mark.parametrize(
    "change",
    [{"master": "host"}, {"master": "a b:1"}, {"prefix": ""}, {"prefix": "/x"}, {"protocol": "x"}, {"segment_gb": 1}],
    ids=["no port", "space", "no prefix", "absolute", "protocol", "segment"],
)
def test_invalid_specifications(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SOURCE_SPECS.validate_python([SPEC.model_dump() | change])


def test_the_settings_of_a_run() -> None:
    config = MooncakeConfig(master="moon-0:50051", segment_gb=20)
    assert MooncakeSpec(prefix="x", **config.model_dump(exclude={"segment_gb"})).protocol == "rdma"
