"""Checkpoints are uploaded while a run trains, and a host without the run's folder resumes from them."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_setup import Died, Setup
from safetensors.torch import load_file

from agentrl.configs.publish_config import StorageConfig
from agentrl.errors import StorageError, UserError
from agentrl.storage import object_store, stored_folders
from agentrl.storage.folder_manifest import MANIFEST
from agentrl.storage.object_store import ObjectStore
from agentrl.trainer.checkpoints.checkpoint import META
from agentrl.trainer.checkpoints.stored_checkpoints import StoredCheckpoints, can_fetch
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import TrainingRun

KEY = "test/checkpoints"


@pytest.fixture
def n_steps() -> int:
    return 4


@pytest.fixture
def store(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The storage of the run."""
    monkeypatch.setattr(object_store, "PAUSES_S", ())
    url = f"file://{tmp_path}/storage"
    setup.config = setup.config.model_copy(update={"storage": StorageConfig(url=url)})
    return ObjectStore(url)


def die_before(monkeypatch: pytest.MonkeyPatch, setup: Setup, step: int) -> None:
    """Train until `step` has its batch, and its last upload is done; then the trainer is gone."""
    real = TrainingRun.update

    def update(run: TrainingRun, batch: Any) -> Any:
        if batch.step == step:
            assert run._t.stored is not None
            run._t.stored.wait()
            raise Died
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "update", update)
        with pytest.raises(Died):
            setup.train()


def on_disk(setup: Setup) -> list[str]:
    return sorted(path.name for path in (setup.config.run_dir / "checkpoints").glob("step-*"))


def final_weights(setup: Setup) -> dict[str, torch.Tensor]:
    return load_file(setup.config.run_dir / "model" / "model.safetensors")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_failed_upload_does_not_leave_old_checkpoints_in_the_storage(tmp_path, monkeypatch, restarted):
    """The trainer may end before another upload succeeds."""
    monkeypatch.setattr(object_store, "PAUSES_S", ())
    root, store = tmp_path / "checkpoints", ObjectStore(f"file://{tmp_path}/storage")
    first, second, third = (root / f"step-00000{n}-0{n}" for n in (1, 2, 3))
    for folder in (first, second, third):
        folder.mkdir(parents=True)
        (folder / META).write_text("{}")
    stored = StoredCheckpoints(store, "test", root)
    stored.send([second, first])
    stored.wait()

    def refuse(*_: Any) -> None:
        raise StorageError("no")

    stored.delete_later([first.name, second.name])  # the second is still there when the trainer ends
    shutil.rmtree(first)
    with monkeypatch.context() as patch:
        patch.setattr(stored_folders, "upload", refuse)
        stored.send([third, second])
        with pytest.raises(StorageError):
            stored.wait()
    assert store.names(KEY) == [first.name, second.name]
    stored = StoredCheckpoints(store, "test", root) if restarted else stored
    for left in ([second.name, third.name], [third.name]):
        stored.send([third])
        stored.wait()
        assert store.names(KEY) == left
        shutil.rmtree(second, ignore_errors=True)


@pytest.mark.long
def test_the_storage_has_the_checkpoints_of_the_disk(setup, store):
    assert setup.train()
    assert store.names(KEY) == on_disk(setup)
    assert len(store.names(KEY)) == setup.config.trainer.keep_checkpoints
    assert all(MANIFEST in store.names(f"{KEY}/{name}") for name in store.names(KEY))


def test_a_host_without_the_folder_resumes_from_the_storage(setup, store, monkeypatch, tmp_path, tiny_model, world):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Setup(tmp_path / "undisturbed", tiny_model, world, steps=4)
    with undisturbed.proxy:
        assert undisturbed.train()
    undisturbed.database.close()

    die_before(monkeypatch, setup, 3)
    shutil.rmtree(setup.config.run_dir)
    lineage = StoredLineage.of(setup.database, setup.config)
    assert can_fetch(setup.config, setup.config.run_dir / "checkpoints", lineage.survives)
    assert setup.train()
    assert [step for step, state, *_ in setup.steps() if state == "published"] == [1, 2, 3, 4]
    assert setup.query("SELECT step FROM steps WHERE state = 'rolled_back'") == [(3,)]  # it had only begun
    found, expected = final_weights(setup), final_weights(undisturbed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_with_a_changed_byte_is_passed_over(setup, store, monkeypatch, capsys):
    die_before(monkeypatch, setup, 3)
    shutil.rmtree(setup.config.run_dir)
    newest = store.names(KEY)[-1]
    data = bytearray(store.read(f"{KEY}/{newest}/meta.json", 10**6) or b"")
    data[10] ^= 1
    store.write(f"{KEY}/{newest}/meta.json", bytes(data))
    assert setup.train()
    said = capsys.readouterr().out
    assert f"ignoring checkpoint {store.url}/{KEY}/{newest}: meta.json has the SHA-256" in said
    assert "rolled back steps [2, 3]: they have no checkpoint" in said


def test_an_upload_that_was_interrupted_is_done_at_the_next_start(setup, store, monkeypatch):
    die_before(monkeypatch, setup, 3)
    newest = store.names(KEY)[-1]
    store.delete(f"{KEY}/{newest}/{MANIFEST}")
    die_before(monkeypatch, setup, 3)
    assert MANIFEST in store.names(f"{KEY}/{newest}")


def test_checkpoints_of_another_database_are_not_used(setup, store, monkeypatch):
    store.write(f"{KEY}/step-000009-01a/{MANIFEST}", b"{}")
    store.write(f"{KEY}/notes.txt", b"")
    assert setup.train()
    assert {"step-000009-01a", "notes.txt"} < {*store.names(KEY)}


def test_a_run_whose_checkpoints_are_nowhere_is_not_trained_again(setup, store, monkeypatch):
    die_before(monkeypatch, setup, 3)
    shutil.rmtree(setup.config.run_dir)
    store.delete(KEY)
    lineage = StoredLineage.of(setup.database, setup.config)
    assert not can_fetch(setup.config, setup.config.run_dir / "checkpoints", lineage.survives)
    with pytest.raises(UserError, match="is trained up to step 2, but"):
        setup.train()


def test_a_storage_that_refuses_ends_the_trainer_with_one_error_and_no_step_is_lost(
    setup, store, monkeypatch, tmp_path
):
    (tmp_path / "storage").touch()  # a file where the folder should be
    with pytest.raises(StorageError, match=rf"cannot .* {store.url}/{KEY}"):
        setup.train()
    (tmp_path / "storage").unlink()
    assert setup.train()
    assert setup.query("SELECT count(*) FROM steps WHERE state = 'rolled_back'") == [(0,)]


def stored_steps(setup: Setup) -> list[int]:
    """The steps whose checkpoint the store says to be in the storage."""
    rows = setup.query("SELECT step FROM checkpoints JOIN steps ON steps.id = step_id WHERE stored_at IS NOT NULL")
    return sorted(step for (step,) in rows)


def test_steps_do_not_wait_for_a_slow_upload_and_the_last_that_is_in_both_places_stays(setup, store, monkeypatch):
    """The upload of step 2 is slow; meanwhile steps 3 and 4 are trained."""
    slow, upload = threading.Event(), stored_folders.upload

    def uploaded(to: ObjectStore, folder: Path, key: str) -> None:
        if "step-000002" in key:
            assert slow.wait(60)
        upload(to, folder, key)

    monkeypatch.setattr(stored_folders, "upload", uploaded)
    real, seen = TrainingRun.update, []

    def update(run: TrainingRun, batch: Any) -> Any:
        stored = run._t.stored
        assert stored is not None
        if batch.step == 2:
            stored.wait()
        seen.append([name[5:11] for name in on_disk(setup)])
        return real(run, batch)

    monkeypatch.setattr(TrainingRun, "update", update)
    complete = StoredLineage.complete

    def completed(self: StoredLineage, record: Any, *args: Any) -> None:
        complete(self, record, *args)
        if record.step == 4:
            assert [name[5:11] for name in on_disk(setup)][:2] == ["000001", "000002"]
            slow.set()

    monkeypatch.setattr(StoredLineage, "complete", completed)
    assert setup.train()
    assert seen == [[], ["000001"], ["000001", "000002"], ["000001", "000002", "000003"]]
    assert [name[5:11] for name in on_disk(setup)] == ["000003", "000004"]
    assert store.names(KEY) == on_disk(setup)
    assert {3, 4} <= set(stored_steps(setup))


def test_a_checkpoint_that_is_not_the_recorded_one_is_passed_over(setup, store, monkeypatch, capsys):
    """All files and the manifest of the storage fit together, but the trainer wrote others."""
    die_before(monkeypatch, setup, 3)
    shutil.rmtree(setup.config.run_dir)
    newest = store.names(KEY)[-1]
    copy = setup.config.runs_dir / "copy"
    stored_folders.download(store, f"{KEY}/{newest}", copy)
    meta = json.loads((copy / META).read_text())
    (copy / META).write_text(json.dumps(meta | {"metrics": {}}))
    stored_folders.upload(store, copy, f"{KEY}/{newest}")
    assert setup.train()
    said = capsys.readouterr().out
    assert f"ignoring checkpoint {store.url}/{KEY}/{newest}: its digest is" in said
    assert f"set aside as stray-{newest}" in said
    assert "rolled back steps [2, 3]: they have no checkpoint" in said


@pytest.mark.long
def test_a_host_whose_newest_checkpoint_is_damaged_takes_the_one_in_the_storage(setup, store, monkeypatch, capsys):
    die_before(monkeypatch, setup, 3)
    newest = setup.config.run_dir / "checkpoints" / on_disk(setup)[-1]
    (newest / META).write_text("{}")
    assert setup.train()
    assert f"copied checkpoint {newest.name} from {store.url}/{KEY}" in capsys.readouterr().out
    assert setup.query("SELECT step FROM steps WHERE state = 'rolled_back'") == [(3,)]  # it had only begun


@pytest.mark.long
def test_the_store_says_which_checkpoints_are_in_the_storage(setup, store, monkeypatch):
    die_before(monkeypatch, setup, 3)
    assert stored_steps(setup)[:1] == [1]
    die_before(monkeypatch, setup, 1 + 2)  # the next start finds step 2 in the storage
    assert setup.train()
    assert {2, 3, 4} <= set(stored_steps(setup))


@pytest.mark.long
def test_versions_of_a_host_before_are_deleted_and_those_of_another_database_are_not(setup, store, monkeypatch):
    storage = setup.config.storage.model_copy(update={"weights": True})
    setup.config = setup.config.model_copy(update={"storage": storage})
    store.write(f"test/weights/v1-01b/{MANIFEST}", b"{}")
    die_before(monkeypatch, setup, 3)
    shutil.rmtree(setup.config.run_dir)
    assert setup.train()
    kept = [name for name in store.names("test/weights") if name != "v1-01b"]
    assert "v1-01b" in store.names("test/weights")
    rows = setup.query("SELECT path FROM weight_versions WHERE version > 0 AND state != 'rolled_back' ORDER BY version")
    assert kept == [Path(path).name for (path,) in rows][-len(kept) :]
    assert len(kept) < len(rows)


def test_versions_are_uploaded_before_they_are_published_and_deleted_with_their_folders(setup, store, monkeypatch):
    storage = setup.config.storage.model_copy(update={"weights": True})
    setup.config = setup.config.model_copy(update={"storage": storage})
    missing: list[int] = []
    publish = Publisher.publish

    def looked(self: Publisher, version: int, *args: Any) -> bool:
        names = [name for name in store.names("test/weights") if name.startswith(f"v{version}-")]
        if not names or MANIFEST not in store.names(f"test/weights/{names[0]}"):
            missing.append(version)
        return publish(self, version, *args)

    monkeypatch.setattr(Publisher, "publish", looked)
    assert setup.train()
    assert missing == []
    on_disk = sorted(path.name for path in (setup.config.run_dir / "weights").glob("v*"))
    assert store.names("test/weights") == on_disk
    assert len(on_disk) < 4
