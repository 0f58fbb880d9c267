"""An engine is never told to load tensors that are not the ones that the trainer recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import add_version

from agentrl.errors import StoreError
from agentrl.proxy.engines import weight_checks
from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.proxy.engines.weight_checks import WeightFolders
from agentrl.versions import weights_folder
from agentrl.versions.version_cache import VersionCache
from tests.version_folders import changed, read_tensors, tensors, write_version

LOAD = "/update_weights_from_disk"
NORM = "model.norm.weight"
WIDTH = 128
"""Of the tiny model."""


def write(folder: Path, value: float, name: str = NORM) -> str:
    folder.mkdir(exist_ok=True)
    save_file({name: np.full(WIDTH, value, np.float32)}, folder / weights_folder.TENSORS)
    return weights_folder.checksum(folder / weights_folder.TENSORS)


async def test_tensors_that_were_exchanged_or_cut_are_refused_until_they_are_back(tmp_path: Path) -> None:
    folder, checked = tmp_path / "v1-a", WeightFolders()
    recorded = write(folder, 1.0)
    assert await checked.checked(1, str(folder), recorded) == str(folder)
    write(folder, 2.0)
    with pytest.raises(StoreError, match=r"version 1 is not loaded: .*v1-a/model.safetensors are not those"):
        await checked.checked(1, str(folder), recorded)
    write(folder, 1.0)
    assert await checked.checked(1, str(folder), recorded) == str(folder)
    data = (folder / weights_folder.TENSORS).read_bytes()
    for damaged in (data[:-4], data[:20], b""):
        (folder / weights_folder.TENSORS).write_bytes(damaged)
        with pytest.raises(StoreError, match="checksum damaged"):
            await checked.checked(1, str(folder), recorded)


async def test_a_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def read(file: Path) -> str:
        reads.append(file)
        return "c"

    monkeypatch.setattr(weight_checks, "_checksum", read)
    write(tmp_path, 1.0)
    checked = WeightFolders()
    for _ in range(3):
        await checked.checked(1, str(tmp_path), "c")
        with pytest.raises(StoreError):
            await checked.checked(1, str(tmp_path), "another")
    assert reads == [tmp_path / weights_folder.TENSORS]


async def test_a_disk_that_the_proxy_does_not_have_is_the_engines_business(tmp_path: Path) -> None:
    assert await WeightFolders().checked(1, str(tmp_path / "elsewhere"), "c") == str(tmp_path / "elsewhere")


def test_an_engine_is_not_asked_to_load_other_tensors(proxy, tmp_path) -> None:
    from agentrl.store import runs

    recorded = write(tmp_path / "v1", 1.0)
    assert proxy.database.query(runs.version, proxy.run_id, 1) is None
    add_version(proxy.database, proxy.run_id, 1, tmp_path / "v1", recorded)
    write(tmp_path / "v1", 2.0)
    admin = {"Authorization": "Bearer admin-key"}
    refused = proxy.post("/admin/publish", {"version": 1}, headers=admin)
    assert refused.status_code == 503
    assert "are not those that the trainer recorded" in refused.text
    assert proxy.engine.version == 0
    assert proxy.get("/api/engines")[0]["state"] == "serving"
    write(tmp_path / "v1", 1.0)
    assert proxy.post("/admin/publish", {"version": 1}, headers=admin).status_code == 200
    assert proxy.engine.version == "1"


def test_an_engine_is_not_asked_to_load_tensors_of_another_model(proxy, tmp_path) -> None:
    recorded = write(tmp_path / "v1", 1.0, "transformer.norm.weight")
    add_version(proxy.database, proxy.run_id, 1, tmp_path / "v1", recorded)
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "the model has no tensor transformer.norm.weight" in refused.text
    assert LOAD not in [path for path, _ in proxy.engine.calls]
    assert proxy.get("/api/engines")[0]["state"] == "serving"


class TestVersionsWithAManifest:
    """Version 2 is only a delta of version 1."""

    @pytest.fixture
    def folders(self, tmp_path: Path) -> WeightFolders:
        draw = np.random.default_rng(1)
        before = tensors(draw, 40)
        self.after = changed(draw, before)
        first = write_version(tmp_path / "weights", "v1-a", before)
        self.second = write_version(tmp_path / "weights", "v2-a", self.after, (first, before), whole=False)
        self.first = first
        places = VersionPlaces(
            weights=tmp_path / "weights",
            cache=VersionCache(tmp_path / "cache", 1 << 30),
            storage_url=None,
            admin_key="k",
            address=lambda url: None,
        )
        return WeightFolders(places=places)

    async def test_whole_files_are_used_where_they_are(self, folders: WeightFolders, tmp_path: Path) -> None:
        path = str(tmp_path / "weights" / "v1-a")
        assert await folders.checked(1, path, self.first.checksum) == path

    async def test_a_delta_is_made_whole_and_stays_until_later_versions_are_asked_for(
        self, folders: WeightFolders, tmp_path: Path
    ) -> None:
        path = str(tmp_path / "weights" / "v2-a")
        made = await folders.checked(2, path, self.second.checksum)
        assert made != path
        assert read_tensors(Path(made)) == {name: tensor.data for name, tensor in self.after.items()}
        assert await folders.checked(2, path, self.second.checksum) == made

    async def test_a_folder_that_was_recorded_elsewhere_is_found_in_the_runs_own(self, folders: WeightFolders) -> None:
        made = await folders.checked(2, "/on/the/trainers/host/v2-a", self.second.checksum)
        assert read_tensors(Path(made)) == {name: tensor.data for name, tensor in self.after.items()}

    async def test_other_tensors_than_recorded_are_refused(self, folders: WeightFolders, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match=r"version 1 is not loaded: .*; restart the trainer"):
            await folders.checked(1, str(tmp_path / "weights" / "v1-a"), self.second.checksum)
        (file,) = (tmp_path / "weights" / "v1-a").glob("model-00001*")
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        with pytest.raises(StoreError, match="version 1 is not loaded"):
            await folders.checked(1, str(tmp_path / "weights" / "v1-a"), self.first.checksum)

    async def test_a_folder_that_only_engines_see_passes(self, folders: WeightFolders) -> None:
        assert await folders.checked(7, "/on/the/trainers/host/v7-a", "0" * 64) == "/on/the/trainers/host/v7-a"
