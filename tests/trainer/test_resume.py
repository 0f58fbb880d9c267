"""Resuming after more than one step was lost, beside another database, without checkpoints, past a stopped trainer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from folders import read_part
from loop_setup import Setup, die_before, same
from safetensors.torch import load_file
from sqlalchemy import text
from support import save_tiny_model

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.configs.publish_config import MooncakeConfig
from agentrl.configs.trainer_config import LoraConfig
from agentrl.errors import FencedError, UserError
from agentrl.store import runs
from agentrl.store.training import steps
from agentrl.trainer.checkpoints import checkpoint, checkpoint_writer
from agentrl.trainer.distributed import World
from agentrl.trainer.models import run_models
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run import trainer_start
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.weights import version_writer
from agentrl.versions.transports.mooncake_source import MooncakeSource, mooncake_spec
from agentrl.versions.version_manifest import VersionManifest
from agentrl.versions.weights_folder import ADAPTER, TENSORS, checksum
from tests import fake_mooncake

STEPS = 8


@pytest.fixture
def n_steps() -> int:
    return STEPS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, world: World) -> dict[str, torch.Tensor]:
    """Final weights of a run that nothing happened to."""
    s = Setup(tmp_path_factory.mktemp("undisturbed"), tiny_model, world, steps=STEPS)
    with s.proxy:
        assert s.train()
    s.database.close()
    return load_file(s.config.run_dir / "model" / "model.safetensors")


def weights_of(setup: Setup, state: str = "published") -> dict[int, tuple[Path, str]]:
    """Version → folder and checksum, of the versions in a state."""
    rows = setup.query(
        f"SELECT version, path, checksum FROM weight_versions WHERE state = '{state}' AND path IS NOT NULL"
    )
    return {version: (Path(path), digest) for version, path, digest in rows}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written behind the next steps is there when they look."""
    monkeypatch.setattr(checkpoint_writer.Writing, "done", lambda self: self.future.exception() is None)


def folders(root: Path) -> list[str]:
    """Names of a folder's folders, without the ids in them."""
    return sorted(p.name.rsplit("-", 1)[0] for p in root.iterdir())


@pytest.mark.parametrize("lost", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_folder_that_engines_serve_survives_any_number_of_lost_steps(
    setup: Setup, undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    die_before(monkeypatch, setup, 4 + lost + 1, checkpoint_every=4)
    served: list[tuple[int, bool]] = []
    real = Publisher.publish

    def publish(self: Publisher, version: int, *args: Any) -> bool:
        with setup.database.read() as conn:
            current = runs.get(conn, setup.run_id).current_version
            folder = Path(runs.version(conn, setup.run_id, current).path)
        served.append((current, (folder / TENSORS).is_file()))
        return real(self, version, *args)

    monkeypatch.setattr(Publisher, "publish", publish)
    assert setup.train(checkpoint_every=4)
    assert [v for v, _ in served][:3] == [4 + lost, 4, 4 + lost + 1]
    assert all(there for _, there in served), served
    assert same(undisturbed, setup.config.run_dir / "model")
    assert len(list((setup.config.run_dir / "weights").iterdir())) == 3


def test_a_full_disk_gets_room_from_the_versions_of_lost_steps(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's version has no folder any more, and the disk has room for it without those of lost steps."""
    die_before(monkeypatch, setup, 8, checkpoint_every=4)
    weights = setup.config.run_dir / "weights"
    assert folders(weights) == ["v5", "v6", "v7"]
    write = version_writer.complete

    def full(draft: Path, folder: Path, *rest: Any) -> VersionManifest:
        if len(list(weights.glob("v*"))) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(draft, folder, *rest)

    monkeypatch.setattr(version_writer, "complete", full)
    die_before(monkeypatch, setup, 5, checkpoint_every=4)
    assert folders(weights) == ["v4", "v7"]  # the run served v7


def test_statistics_of_rewards_go_on_where_the_checkpoint_is(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run that lost two steps has the statistics and the weights of one that nothing happened to."""
    reward = {"reward": RewardConfig(function="exact", normalize="running")}
    plain = Setup(tmp_path_factory.mktemp("plain"), setup.model, setup.world, steps=STEPS)
    for one in (setup, plain):  # rewards that differ from step to step
        with one.database.write() as conn:
            conn.exec_driver_sql("UPDATE rewards SET value = value * (1 + rowid % 7) + rowid % 5")
        one.config = one.config.model_copy(update=reward)
    with plain.proxy:
        assert plain.train(checkpoint_every=4)
    expected = load_file(plain.config.run_dir / "model" / "model.safetensors")
    die_before(monkeypatch, setup, 7, checkpoint_every=4)
    assert setup.train(checkpoint_every=4)
    assert same(expected, setup.config.run_dir / "model")
    kept = "SELECT step, reward_scaling, batch_digest FROM steps WHERE state = 'published' ORDER BY step"
    rows = setup.query(kept)
    assert rows == plain.query(kept)
    counts = [json.loads(scaling)["moments"][0][2] for _, scaling, _ in rows]
    assert counts == [6 * (1 + i) for i in range(STEPS)]
    assert len({scaling for _, scaling, _ in rows}) == STEPS
    plain.database.close()


def test_every_published_version_has_its_own_folder_that_matches_its_checksum(setup: Setup) -> None:
    assert setup.train()
    for row in setup.query("SELECT w.version, s.id, w.path FROM weight_versions w JOIN steps s USING (run_id, step)"):
        assert Path(row[2]).name == f"v{row[0]}-{row[1]}"
    newest = {v: found for v, found in weights_of(setup).items() if v > STEPS - 3}
    assert all(checksum(path / TENSORS) == digest for path, digest in newest.values())


@pytest.mark.long
def test_a_mooncake_store_has_the_versions_whose_folders_are_kept(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = fake_mooncake.install(monkeypatch)
    store = MooncakeConfig(master="127.0.0.1:50051")
    publish = setup.config.publish.model_copy(update={"mooncake": store})
    setup.config = setup.config.model_copy(update={"publish": publish})
    assert setup.train()
    kept = {path.name for path in (setup.config.run_dir / "weights").iterdir()}
    spec = mooncake_spec(store, setup.config.name)
    assert spec is not None
    assert {key.split("/")[2] for key in master.objects} == kept
    for name in kept:
        written = (setup.config.run_dir / "weights" / name / "version.json").read_bytes()
        assert MooncakeSource(spec).manifest(name).dumps() == written


def test_a_resume_reuses_the_folder_that_engines_may_be_reading(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    die_before(monkeypatch, setup, 3)
    folder, _ = weights_of(setup)[2]
    before = (folder.stat().st_ino, (folder / TENSORS).stat().st_ino)
    die_before(monkeypatch, setup, 3)
    assert (folder.stat().st_ino, (folder / TENSORS).stat().st_ino) == before


@pytest.mark.parametrize("damage", ["other tensors", "truncated", "gone"])
def test_a_resume_writes_a_damaged_folder_again(setup: Setup, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    die_before(monkeypatch, setup, 3)
    folder, digest = weights_of(setup)[2]
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        source = weights_of(setup)[1][0] / TENSORS
        (folder / TENSORS).unlink()
        data = source.read_bytes()
        (folder / TENSORS).write_bytes(data if damage == "other tensors" else data[:1000])
    die_before(monkeypatch, setup, 3)
    assert checksum(folder / TENSORS) == digest


@pytest.mark.parametrize("change", ["another type", "another checksum"])
def test_a_folder_that_a_resume_writes_again_matches_the_store(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Engines may get another type from now on; a database may have checksums of an older release."""
    die_before(monkeypatch, setup, 3)
    if change == "another type":
        engine = setup.config.engine.model_copy(update={"dtype": "bfloat16"})
        setup.config = setup.config.model_copy(update={"engine": engine})
    else:
        with setup.database.write() as conn:
            conn.execute(text("UPDATE weight_versions SET checksum = 'older' WHERE version > 0"))
    die_before(monkeypatch, setup, 3)  # before it has trained anything
    (_, (newest, digest)) = max(weights_of(setup).items())
    assert checksum(newest / TENSORS) == digest
    types = {t.dtype for t in load_file(newest / TENSORS).values() if t.ndim > 1}
    assert types == {torch.bfloat16 if change == "another type" else torch.float32}


def test_a_trainer_stopped_before_it_saved_does_not_touch_its_successors_weights(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StoredLineage.check
    overtaken = False

    def stopped(self: StoredLineage) -> None:
        nonlocal overtaken
        real(self)
        if self.epoch == 1 and not overtaken:
            overtaken = True
            die_before(monkeypatch, setup, 3)  # the successor trains steps 1 and 2 meanwhile

    monkeypatch.setattr(StoredLineage, "check", stopped)
    with pytest.raises(FencedError):
        setup.train(lr=0.1)  # other weights than the successor's
    assert overtaken
    assert sorted(weights_of(setup)) == [1, 2]
    for folder, digest in weights_of(setup).values():
        assert checksum(folder / TENSORS) == digest
    assert setup.train()  # what the old one left disturbs nobody
    assert [s for s, *_ in setup.steps()] == list(range(1, STEPS + 1))


def test_an_overtaken_trainer_deletes_no_checkpoint_of_its_successor(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint_writer.begin

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        die_before(monkeypatch, setup, 4)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint_writer, "begin", overtaken)
    with pytest.raises(FencedError):
        setup.train()
    with setup.database.read() as conn:
        ids = {s.step: s.id for s in steps.of_run(conn, setup.run_id)}
    for step in (2, 3):
        assert (setup.config.run_dir / "checkpoints" / f"step-{step:06d}-{ids[step]}").is_dir()


@pytest.mark.long
def test_with_an_older_database_newer_checkpoints_are_set_aside(
    setup: Setup, undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    die_before(monkeypatch, setup, 2)
    backup = setup.config.run_dir / "backup.db"
    store = setup.config.runs_dir / "store.db"
    _copy(store, backup)
    die_before(monkeypatch, setup, 5, keep_checkpoints=9)
    _copy(backup, store)
    for _ in range(2):
        die_before(monkeypatch, setup, 3)
    out = capsys.readouterr().out
    assert out.count("or is not in this database") == 3
    assert folders(setup.config.run_dir / "checkpoints") == [
        "step-000001",
        "step-000002",
        "stray-step-000002",
        "stray-step-000003",
        "stray-step-000004",
    ]
    assert setup.train()
    assert same(undisturbed, setup.config.run_dir / "model")


@pytest.mark.long
def test_a_run_without_its_checkpoints_starts_over_only_when_asked(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    die_before(monkeypatch, setup, 4)
    root = setup.config.run_dir / "checkpoints"
    for folder in root.iterdir():
        meta = folder / "meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 1}))
    before = setup.query("SELECT id, state FROM steps ORDER BY id")
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            setup.train()
        said = str(caught.value)
        assert str(root.resolve()) in said
        assert "step 3" in said
        assert said.count(f"format 1 is not {checkpoint.FORMAT}") == 2
        assert "--from-base" in said
        assert "\n" not in said
    assert setup.query("SELECT id, state FROM steps ORDER BY id") == before
    assert len(list(root.glob("step-*"))) == 2

    assert setup.train(from_base=True)
    assert "rolled back steps [1, 2, 3, 4]" in capsys.readouterr().out
    assert len(list(root.glob("stray-*"))) == 2
    assert len(setup.steps()) == STEPS


def test_a_missing_checkpoint_folder_is_named(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    die_before(monkeypatch, setup, 2)
    setup.config.run_dir.rename(setup.config.runs_dir / "elsewhere")
    with pytest.raises(UserError, match=r"test/checkpoints does not exist"):
        setup.train()


def test_from_base_keeps_a_usable_checkpoint(setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    die_before(monkeypatch, setup, 3)
    die_before(monkeypatch, setup, 4, from_base=True)
    assert "resuming after step 2" in capsys.readouterr().out


def test_a_critic_and_its_moments_are_the_same_after_a_resume(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo = {"algorithm": Algorithm(preset="ppo"), "critic_lr": 1e-2}
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world, steps=4)
    with whole.proxy:
        assert whole.train(**ppo)
    whole.database.close()
    setup.config = setup.config.model_copy(update={"steps": 4})
    die_before(monkeypatch, setup, 3, **ppo)
    assert setup.train(**ppo)
    assert same(load_file(whole.config.run_dir / "model" / "model.safetensors"), setup.config.run_dir / "model")
    first, second = (
        read_part(next(s.config.run_dir.glob("checkpoints/step-000004-*")), "critic", s.world) for s in (whole, setup)
    )
    assert "value.weight" in first
    assert all(torch.equal(first[name], second[name]) for name in first)
    metrics = [
        json.loads(m) for (m,) in setup.query("SELECT metrics FROM steps WHERE state = 'published' ORDER BY step")
    ]
    assert metrics[0]["explained_variance"] == 0 < metrics[0]["value_loss"]


@pytest.mark.parametrize("kl", ["loss", pytest.param("reward", marks=pytest.mark.long)])
def test_a_refreshed_reference_is_the_same_after_a_resume(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kl: str
) -> None:
    algorithm = Algorithm(kl_coef=1.0, kl=kl, kl_estimator="k2", kl_refresh_steps=2)  # type: ignore[arg-type]
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world, steps=4)
    fixed = Setup(tmp_path_factory.mktemp("fixed"), setup.model, setup.world, steps=4)
    for each, chosen in ((whole, algorithm), (fixed, algorithm.model_copy(update={"kl_refresh_steps": None}))):
        with each.proxy:
            assert each.train(algorithm=chosen)
        each.database.close()
    expected = load_file(whole.config.run_dir / "model" / "model.safetensors")
    assert not same(expected, fixed.config.run_dir / "model")
    setup.config = setup.config.model_copy(update={"steps": 4})
    die_before(monkeypatch, setup, 4, algorithm=algorithm)  # the reference is of step 2, the policy of step 3
    assert setup.train(algorithm=algorithm)
    assert same(expected, setup.config.run_dir / "model")


@pytest.mark.parametrize("form", ["full", pytest.param("sampled", marks=pytest.mark.long)])
def test_a_student_is_the_same_after_a_resume(
    setup: Setup,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    form: Literal["full", "sampled"],
) -> None:
    monkeypatch.setattr(run_models, "resolve_model", Path)  # the folders have no tokenizers
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    monkeypatch.setattr(trainer_start, "resolve_model", Path)
    teacher = str(save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5))
    taught = {"teacher": teacher, "algorithm": Algorithm(distill_coef=1.0, distill=form)}
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world, steps=4)
    with whole.proxy:
        assert whole.train(**taught)
    assert len(set(whole.step_metrics("kl_teacher"))) == 4
    whole.database.close()
    setup.config = setup.config.model_copy(update={"steps": 4})
    die_before(monkeypatch, setup, 3, **taught)
    assert setup.train(**taught)
    assert same(load_file(whole.config.run_dir / "model" / "model.safetensors"), setup.config.run_dir / "model")


def test_a_controlled_divergence_has_the_same_weight_after_a_resume(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = Algorithm(kl_coef=0.5, kl_target=1e-5, kl_gain=1.0)
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world, steps=4)
    with whole.proxy:
        assert whole.train(algorithm=algorithm)
    expected = whole.step_metrics("kl_coef")
    whole.database.close()
    setup.config = setup.config.model_copy(update={"steps": 4})
    die_before(monkeypatch, setup, 4, algorithm=algorithm)
    assert setup.train(algorithm=algorithm)
    assert setup.step_metrics("kl_coef") == expected
    assert expected[:2] == [0.5, 0.4]  # no divergence before the first step
    assert expected[2] > expected[1]
    assert same(load_file(whole.config.run_dir / "model" / "model.safetensors"), setup.config.run_dir / "model")


@pytest.mark.parametrize("died_before", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_that_never_had_a_checkpoint_starts_over_without_asking(
    setup: Setup, undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, died_before: int
) -> None:
    die_before(monkeypatch, setup, died_before, checkpoint_every=4)
    assert setup.train(checkpoint_every=1)  # the interval may change: what counts is what was done
    assert same(undisturbed, setup.config.run_dir / "model")


def test_a_step_of_an_older_release_is_judged_by_the_interval(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    die_before(monkeypatch, setup, 3, checkpoint_every=4)
    with setup.database.write() as conn:
        conn.exec_driver_sql("UPDATE steps SET metrics = '{}'")
    with pytest.raises(UserError, match="from-base"):
        setup.train(checkpoint_every=2)
    die_before(monkeypatch, setup, 1, checkpoint_every=3)


def _copy(source: Path, target: Path) -> None:
    """All of a database that is in use into another one."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


@pytest.mark.parametrize(
    ("publish", "tensors"), [pytest.param("merged", TENSORS, marks=pytest.mark.long), ("adapter", ADAPTER)]
)
def test_a_run_with_an_adapter_resumes_and_keeps_its_engines_folder(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, publish: Literal["merged", "adapter"], tensors: str
) -> None:
    adapter = LoraConfig(rank=2, targets=["q_proj"], publish=publish)
    die_before(monkeypatch, setup, 3, lora=adapter)
    (_, (folder, _)) = max(weights_of(setup).items())
    before = (folder.stat().st_ino, (folder / tensors).stat().st_ino)
    die_before(monkeypatch, setup, 4, lora=adapter)
    assert (folder.stat().st_ino, (folder / tensors).stat().st_ino) == before
    assert setup.train(lora=adapter)
    (_, (newest, digest)) = max(weights_of(setup).items())
    assert checksum(newest / tensors) == digest
    served, run_dir = load_file(newest / tensors), setup.config.run_dir
    if publish == "adapter":
        final = load_file(run_dir / "adapter" / ADAPTER)
        assert final.keys() < served.keys()
        assert all(torch.equal(served[name], tensor) for name, tensor in final.items())
    else:
        final = load_file(run_dir / "model" / TENSORS)
        assert len(served) == 3
        assert all(torch.equal(final[name], tensor) for name, tensor in served.items())
    assert (run_dir / "adapter" / "adapter_config.json").is_file()
