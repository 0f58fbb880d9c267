"""The loop against a real store: finishing, stopping, and resuming after a death at every point of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_setup import Died, Setup, same
from proxy_stub import ADMIN_KEY, play_groups
from safetensors.torch import load_file
from support import save_tiny_model
from transformers import AutoModelForCausalLM

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import AlarmConfig
from agentrl.errors import AgentRLError, FencedError
from agentrl.store import events, runs
from agentrl.store.training import step_resume, steps, trainer_epochs
from agentrl.trainer.checkpoints import checkpoint, checkpoint_folders, checkpoint_reader, checkpoint_writer
from agentrl.trainer.distributed import World
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.stop import Stop
from agentrl.trainer.stored_lineage import StoredLineage


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, world: World) -> dict[str, torch.Tensor]:
    """Final weights of a run that nothing happened to."""
    s = Setup(tmp_path_factory.mktemp("undisturbed"), tiny_model, world)
    with s.proxy:
        assert s.train()
    s.database.close()
    return load_file(s.config.run_dir / "model" / "model.safetensors")


def test_a_run_finishes_with_every_step_recorded_published_and_exported(setup: Setup, capsys: Any) -> None:
    assert setup.train()
    assert setup.steps() == [(1, "published", 0, 1), (2, "published", 1, 2), (3, "published", 2, 3)]
    assert setup.proxy.published == [1, 2, 3]
    assert setup.query("SELECT state, count(*) FROM trajectories GROUP BY state") == [("trained", 18)]
    with setup.database.read() as conn:
        assert runs.get(conn, setup.run_id).status == "finished"
        metrics = [s.metrics for s in steps.of_run(conn, setup.run_id)]
        version = runs.version(conn, setup.run_id, 3)
        kinds = [e.kind for e in events.of_run(conn, setup.run_id)]
    assert [m["off_policy/max"] for m in metrics] == [0, 1, 2]
    assert metrics[0]["mismatch_tokens"] == metrics[0]["tokens_trained"] == 6 * 8
    assert "logprob_mismatch_mean_abs" not in metrics[1]  # all of its tokens are older: that is drift
    assert metrics[1]["drift"] > 0
    assert metrics[0]["reward/mean"] == 1.0
    assert Path(version.path, "model.safetensors").is_file()
    assert len(version.checksum) == 64
    assert kinds.count("train_step") == kinds.count("wait_for_batch") == kinds.count("wait_for_publish") == 3
    assert "step 3/3" in capsys.readouterr().out


def test_the_export_is_the_base_model_with_the_published_tensors(setup: Setup) -> None:
    setup.train()
    exported = AutoModelForCausalLM.from_pretrained(setup.config.run_dir / "model").state_dict()
    base = AutoModelForCausalLM.from_pretrained(setup.model).state_dict()
    published = load_file(next(setup.config.run_dir.joinpath("weights").glob("v3-*/model.safetensors")))
    assert all(n.startswith(("model.layers.1.", "model.layers.2.", "model.norm.")) for n in published)
    for name in base:
        assert torch.equal(exported[name], published.get(name, base[name])), name
        assert torch.equal(exported[name], base[name]) == (name not in published), name


def test_engines_get_their_own_type_and_the_export_keeps_the_base_models(setup: Setup) -> None:
    engine = setup.config.engine.model_copy(update={"dtype": "bfloat16"})
    setup.config = setup.config.model_copy(update={"engine": engine})
    setup.train()
    exported = load_file(setup.config.run_dir / "model" / "model.safetensors")
    published = load_file(next(setup.config.run_dir.joinpath("weights").glob("v3-*/model.safetensors")))
    assert {exported[name].dtype for name in published} == {torch.float32}
    for name, tensor in published.items():
        assert tensor.dtype == (torch.bfloat16 if tensor.ndim > 1 else torch.float32)
        assert torch.equal(exported[name].to(tensor.dtype), tensor)


@pytest.mark.parametrize(
    "point", ["before checkpoint", "after checkpoint", pytest.param("after complete", marks=pytest.mark.long)]
)
def test_a_death_at_any_point_of_a_step_changes_nothing(
    setup: Setup, undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Died

    owner, name = {
        "before checkpoint": (checkpoint_writer, "begin"),
        "after checkpoint": (StoredLineage, "complete"),
        "after complete": (Publisher, "publish"),
    }[point]
    real = getattr(owner, name)
    calls = 0

    def die_in_step_two(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return die() if calls == 2 else real(*args, **kwargs)

    monkeypatch.setattr(owner, name, die_in_step_two)
    with pytest.raises(Died):
        setup.train()
    monkeypatch.undo()

    assert setup.train()
    assert [(s, state) for s, state, _, _ in setup.steps()] == [(1, "published"), (2, "published"), (3, "published")]
    assert setup.query("SELECT trajectory_id, count(*) FROM step_trajectories GROUP BY 1 HAVING count(*) > 1") == []
    assert same(undisturbed, setup.config.run_dir / "model")


@pytest.mark.parametrize("damage", [pytest.param("truncated", marks=pytest.mark.long), "no meta", "staging"])
def test_a_partial_checkpoint_is_ignored_with_a_message_and_its_step_repeated(
    setup: Setup, undisturbed: dict[str, torch.Tensor], capsys: Any, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredLineage, "wait_for_batch", _stop_before_step(3, StoredLineage.wait_for_batch, setup.stop))
    assert not setup.train()
    monkeypatch.undo()
    (newest,) = (setup.config.run_dir / "checkpoints").glob("step-000002-*")
    if damage == "truncated":
        (file,) = (newest / checkpoint.STATE).glob("*.distcp")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "no meta":
        (newest / "meta.json").unlink()
    else:
        newest.rename(newest.with_name(".step-000002-abc.0123.part"))  # what a death while writing leaves

    setup.stop = Stop()
    assert setup.train()
    out = capsys.readouterr().out
    assert "rolled back steps [2]" in out
    assert ("ignoring checkpoint" in out) == (damage != "staging")
    assert [v for *_, v in setup.steps()] == [1, 3, 4]  # version 2 is never used again
    assert same(undisturbed, setup.config.run_dir / "model")


def test_stopping_checkpoints_a_step_that_was_not_due(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StoredLineage.next_version

    def stop_in_step_two(self: StoredLineage) -> int:
        version = real(self)
        if version == 2:
            setup.stop.set()
        return version

    monkeypatch.setattr(StoredLineage, "next_version", stop_in_step_two)
    assert not setup.train(checkpoint_every=3)
    found, ignored = checkpoint_folders.newest(setup.config.run_dir / "checkpoints")
    assert found is not None
    assert (found.record.step, ignored) == (2, [])


def test_steps_between_checkpoints_publish_too(setup: Setup, undisturbed: dict[str, torch.Tensor]) -> None:
    assert setup.train(checkpoint_every=2)
    assert setup.proxy.published == [1, 2, 3]
    kept = sorted((setup.config.run_dir / "checkpoints").iterdir())
    assert [p.name[:11] for p in kept] == ["step-000002", "step-000003"]
    assert same(undisturbed, setup.config.run_dir / "model")


def test_the_learning_rate_follows_its_schedule_over_the_runs_steps(setup: Setup) -> None:
    assert setup.train(lr=0.3, lr_schedule="linear")
    with setup.database.read() as conn:
        rates = [step.metrics["lr"] for step in steps.of_run(conn, setup.run_id)]
    assert rates == pytest.approx([0.3, 0.2, 0.1])


def test_run_status_stopping_ends_the_wait(setup: Setup) -> None:
    with setup.database.write() as conn:
        runs.set_status(conn, setup.run_id, "stopping")
    assert not setup.train()
    assert setup.steps() == []


def test_a_run_that_has_failed_ends_the_wait_and_says_why(setup: Setup) -> None:
    lineage = StoredLineage.of(setup.database, setup.config)
    assert lineage.failure() is None
    with setup.database.write() as conn:
        runs.set_status(conn, setup.run_id, "failed", "9 sessions in a row failed")
    assert not setup.train()
    assert lineage.failure() == "run test is failed: 9 sessions in a row failed"


def test_an_old_trainer_is_fenced(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StoredLineage.complete

    def overtaken(self: StoredLineage, *args: Any) -> None:
        StoredLineage.begin(setup.database, setup.config)
        real(self, *args)

    monkeypatch.setattr(StoredLineage, "complete", overtaken)
    with pytest.raises(FencedError, match="epoch 1 is over"):
        setup.train()


def test_a_checkpoint_of_a_step_that_was_rolled_back_is_ignored(
    setup: Setup, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*_: Any) -> None:
        with setup.database.write() as conn:
            step_resume.reconcile(conn, setup.run_id, trainer_epochs.begin_epoch(conn, setup.run_id), None)
        raise FencedError("overtaken between its checkpoint and the store")

    monkeypatch.setattr(StoredLineage, "complete", overtaken)
    with pytest.raises(FencedError):
        setup.train()
    monkeypatch.undo()
    assert setup.train()
    assert "its step was rolled back" in capsys.readouterr().out


def test_publishing_outlives_a_proxy_that_restarts(tmp_path: Path, tiny_model: Path, world: World) -> None:
    s = Setup(tmp_path, tiny_model, world, refuse=2)
    with s.proxy:
        assert s.train()
    assert s.proxy.published == [1, 2, 3]
    assert len(s.said) == 1
    assert "503" in s.said[0]
    s.database.close()


def test_a_refused_publish_is_an_error(setup: Setup) -> None:
    publisher = Publisher(setup.proxy.url + "/nowhere", ADMIN_KEY, setup.stop.wait)
    with pytest.raises(AgentRLError, match="publishing version 1 failed: the proxy answered 404"):
        publisher.publish(1, 1, None)


def _stop_before_step(step: int, real: Any, stop: Stop) -> Any:
    def wait(self: StoredLineage, wanted: int, *args: Any) -> Any:
        if wanted == step:
            stop.set()
            return None
        return real(self, wanted, *args)

    return wait


def test_dapo_waits_for_groups_with_an_advantage(setup: Setup) -> None:
    play_groups(setup.database, setup.run_id, 2, seed=1, values=(0.5, 0.5, 0.5))  # after six with spread
    setup.config = setup.config.model_copy(update={"steps": 4})
    waits = 0

    def wait(_: float) -> bool:
        nonlocal waits
        waits += 1
        play_groups(setup.database, setup.run_id, 1, seed=waits + 1)
        return False

    setup.stop.wait = wait
    assert setup.train(algorithm=Algorithm(preset="dapo"))
    assert setup.query("SELECT state, reason, count(*) FROM trajectories GROUP BY 1, 2 ORDER BY 1") == [
        ("stale", "tied", 6),
        ("trained", None, 24),
    ]
    assert waits == 2
    assert {name for (name,) in setup.query("SELECT estimator FROM steps")} == {"dapo"}


def test_overlong_episodes_lose_advantage_and_keep_their_recorded_return(setup: Setup) -> None:
    setup.config = setup.config.model_copy(update={"steps": 1})
    parts = {"baseline": "none", "normalization": "none", "credit": "trajectory"}
    assert setup.train(algorithm=Algorithm(**parts, overlong_tokens=8, overlong_buffer=4))  # all have eight
    assert setup.query("SELECT advantage, count(*) FROM step_trajectories GROUP BY 1 ORDER BY 1") == [
        (-1.0, 2),
        (0.0, 2),
        (1.0, 2),
    ]
    assert setup.query("SELECT return_mean FROM steps") == [(1.0,)]


def test_the_divergence_from_a_named_reference_is_a_metric(setup: Setup, tmp_path: Path) -> None:
    setup.config = setup.config.model_copy(update={"steps": 2})
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert setup.train(algorithm=Algorithm(kl_coef=0.1), reference=other)
    with setup.database.read() as conn:
        far = [s.metrics["kl_reference"] for s in steps.of_run(conn, setup.run_id)]
    assert min(far) > 0.1  # with the base model as reference the first step has none
    for folder in (setup.config.run_dir / "checkpoints").iterdir():
        assert not checkpoint_reader.shapes(folder, "reference")  # it does not move


def test_an_alarm_is_said_once_and_recorded_while_it_sounds(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    rules = [
        AlarmConfig(metric="tokens_trained", above=0, steps=2),
        AlarmConfig(metric="tokens_trained", above=1e9, steps=1, does="stop"),
        AlarmConfig(metric="entropie", below=1),
    ]
    assert setup.train(alarms=rules)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("alarm", "trainer.alarms"))]
    assert len(said) == 2
    assert "has no metric 'entropie'; did you mean 'entropy'?" in said[0]
    assert "alarm at step 2: tokens_trained is" in said[1]
    found = [json.loads(data) for (data,) in setup.query("SELECT data FROM events WHERE kind = 'alarm'")]
    assert [(one["step"], one["metric"], one["does"]) for one in found] == [(2, "tokens_trained", "warn")]


def test_an_alarm_that_stops_saves_the_step_and_fails_the_run_with_the_reason(setup: Setup) -> None:
    rule = AlarmConfig(metric="tokens_trained", above=0, steps=2, does="stop")
    assert not setup.train(alarms=[rule], checkpoint_every=50)
    ((status, error),) = setup.query("SELECT status, error FROM runs")
    assert status == "failed"
    assert error.startswith("alarm at step 2: tokens_trained is")
    assert error.endswith("to go on, change trainer.alarms and resume")
    assert [p.name.rsplit("-", 1)[0] for p in (setup.config.run_dir / "checkpoints").iterdir()] == ["step-000002"]
    with setup.database.write() as conn:
        runs.set_status(conn, setup.run_id, "running")  # as a resume does
    assert setup.train()
    assert [state for (state,) in setup.query("SELECT state FROM steps ORDER BY step")] == ["published"] * 3


def test_while_the_critic_warms_up_the_policy_is_published_as_it_is(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup.train(algorithm=Algorithm(preset="ppo"), critic_warmup_steps=2)
    said = [line for line in capsys.readouterr().out.splitlines() if "critic only, grad" in line]
    assert len(said) == 2
    found = setup.query("SELECT path FROM weight_versions WHERE path IS NOT NULL ORDER BY version")
    first, second, third = (load_file(Path(path) / "model.safetensors") for (path,) in found)
    base = load_file(setup.model / "model.safetensors")
    assert all(torch.equal(first[name], base[name]) and torch.equal(second[name], base[name]) for name in first)
    assert any(not torch.equal(third[name], base[name]) for name in third)
