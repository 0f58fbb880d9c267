"""The steps of a run as a training script calls them: their order, filters, and scripts in the trainer's process."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_setup import Died, Setup, same, until
from proxy_stub import ADMIN_KEY
from safetensors.torch import load_file

import agentrl
from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.errors import StoreError, UserError
from agentrl.store.audit.run_audit import scan
from agentrl.store.training import steps, trainer_epochs
from agentrl.trainer.distributed import World
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run.step_profile import profile_path
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import TrainingRun, opened
from agentrl.trainer.user_script import run_script

SCRIPT = """
import sys
import agentrl
assert sys.argv[1:] == ["--fast"]
with agentrl.training({"ignored": True}) as run:
    while (batch := run.prepare_batch()) is not None:
        metrics = run.update(batch)
        run.publish()
        assert run.evaluate() is None
"""


@pytest.fixture
def s(tmp_path: Path, tiny_model: Path, world: World) -> Iterator[Setup]:
    setup = Setup(tmp_path, tiny_model, world)
    with setup.proxy:
        yield setup
    setup.database.close()


def opening(s: Setup, **settings: Any) -> AbstractContextManager[TrainingRun]:
    config = s.config.model_copy(update={"trainer": s.config.trainer.model_copy(update=settings)})
    publisher = Publisher(s.proxy.url, ADMIN_KEY, s.stop.wait, s.said.append)
    return opened(config, s.model, s.world, StoredLineage.begin(s.database, config), publisher, s.stop)


def test_a_script_trains_the_same_model_as_the_built_in_loop(
    s: Setup, tmp_path: Path, tiny_model: Path, world: World
) -> None:
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT)
    assert run_script([str(script), "--fast"], partial(opening, s))
    (tmp_path / "builtin").mkdir()
    other = Setup(tmp_path / "builtin", tiny_model, world)
    with other.proxy:
        assert other.train()
    other.database.close()
    assert same(load_file(other.config.run_dir / "model" / "model.safetensors"), s.config.run_dir / "model")
    assert [row[:2] for row in s.steps()] == [(1, "published"), (2, "published"), (3, "published")]


@pytest.mark.parametrize(
    "dies", [pytest.param("update", marks=pytest.mark.long), "save", pytest.param("publish", marks=pytest.mark.long)]
)
def test_a_script_that_dies_resumes_and_ends_where_an_undisturbed_one_does(
    s: Setup, dies: str, tmp_path: Path, tiny_model: Path, world: World
) -> None:
    def play(until: int | None) -> None:
        with opening(s) as run:
            while (batch := run.prepare_batch()) is not None:
                for name, does in {
                    "update": lambda: run.update(batch),
                    "save": run.save,
                    "publish": run.publish,
                }.items():
                    does()
                    if batch.step == until and name == dies:
                        raise Died

    with pytest.raises(Died):
        play(2)
    play(None)
    assert [row[0] for row in s.query("SELECT step FROM steps WHERE state = 'published' ORDER BY step")] == [1, 2, 3]
    assert s.query(
        "SELECT count(*) FROM step_trajectories t JOIN steps s ON s.id = t.step_id WHERE s.state = 'started'"
    )[0] == (0,)
    (tmp_path / "builtin").mkdir()
    other = Setup(tmp_path / "builtin", tiny_model, world)
    with other.proxy:
        assert other.train()
    other.database.close()
    assert same(load_file(other.config.run_dir / "model" / "model.safetensors"), s.config.run_dir / "model")


def test_steps_out_of_order_are_refused(s: Setup) -> None:
    with opening(s) as run:
        with pytest.raises(UserError, match="there is no update that is not saved"):
            run.save()
        batch = run.prepare_batch()
        assert batch is not None
        with pytest.raises(UserError, match="step 1 is not finished: update it first"):
            run.prepare_batch()
        with pytest.raises(UserError, match="there is no step that is not published"):
            run.publish()
        run.update(batch)
        with pytest.raises(UserError, match="give the batch of the last prepare_batch, once"):
            run.update(batch)
        with pytest.raises(UserError, match="save and publish it first"):
            run.prepare_batch()
        run.save()
        with pytest.raises(UserError, match="publish it first"):
            run.prepare_batch()
        run.publish()
        assert (run.step, run.version, run.finished) == (1, 1, False)


def test_refused_groups_never_train_and_others_take_their_places(s: Setup) -> None:
    seen: list[str] = []

    def accept(trajectories: Sequence[TrajectoryTokens]) -> bool | str:
        group_id = trajectories[0].group_id
        assert {t.group_id for t in trajectories} == {group_id}
        if group_id not in seen:
            seen.append(group_id)
        verdicts: dict[int, bool | str] = {0: "too easy", 2: False}
        return verdicts.get(seen.index(group_id), True)

    with opening(s) as run:
        batch = run.prepare_batch(accept)
        assert batch is not None
        assert batch.step == 1
        assert {t.group_id for t in batch.trajectories} == {seen[1], seen[3]}
        run.update(batch)
        run.publish()
    reasons = dict(s.query("SELECT DISTINCT group_id, reason FROM trajectories WHERE state = 'rejected'"))
    assert reasons == {seen[0]: "rejected: too easy", seen[2]: "rejected: should_accept"}
    assert s.query("SELECT returned FROM runs") == [(2,)]
    assert len(s.query("SELECT id FROM steps")) == 1
    with s.database.read() as conn:
        faults = [fault for fault in scan(conn, s.run_id) if "another prompt" not in fault]  # the calls are made up
    assert faults == []


def test_trajectories_over_the_budget_train_alone_and_are_counted(s: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    with opening(s, tokens_per_microbatch=5) as run:
        for _ in range(2):
            batch = run.prepare_batch()
            assert batch is not None
            metrics = run.update(batch)
            assert metrics["over_budget_trajectories"] == len(batch.trajectories)
            assert metrics["tokens_trained"] == sum(int(t.loss_mask.sum()) for t in batch.trajectories)
            run.publish()
    assert capsys.readouterr().out.count("trajectories have more than 5 tokens, up to ") == 1


def test_groups_over_the_budget_can_be_refused(s: Setup) -> None:
    def rejected() -> list[Any]:
        return [reason for (reason,) in s.query("SELECT reason FROM trajectories WHERE state = 'rejected'")]

    def stop_in_the_end() -> None:
        try:
            until(lambda: len(rejected()) == 18)
        finally:
            s.stop.set()

    waiting = threading.Thread(target=stop_in_the_end)
    waiting.start()
    with opening(s, tokens_per_microbatch=5, over_budget="refuse") as run:
        assert run.prepare_batch() is None
    waiting.join()
    assert rejected() == ["rejected: over_budget"] * 18


def test_only_a_leased_step_of_the_newest_trainer_is_given_back(s: Setup) -> None:
    with s.database.write() as conn:
        epoch = trainer_epochs.begin_epoch(conn, s.run_id)
        step_id = steps.lease(conn, s.run_id, epoch, step=1, n_groups=2, max_staleness=9, discount=1.0)
        assert step_id is not None
        with pytest.raises(StoreError, match="has not leased the groups"):
            steps.refuse(conn, s.run_id, epoch, step_id, {"other": "no"})
    with s.database.write() as conn, pytest.raises(StoreError, match="it is not leased"):
        steps.refuse(conn, s.run_id, epoch, "unknown", {})
    with s.database.write() as conn:
        trainer_epochs.begin_epoch(conn, s.run_id)
        with pytest.raises(agentrl.AgentRLError):
            steps.refuse(conn, s.run_id, epoch, step_id, {})


def test_a_loss_and_advantages_of_one_step(s: Setup) -> None:
    def loss(tokens: Any, totals: Any, algorithm: Any) -> Any:
        return -(tokens.advantages_S * tokens.logprobs_S).sum() / totals.tokens, {"n": torch.ones(())}

    with opening(s) as run:
        batch = run.prepare_batch()
        assert batch is not None
        ones = run.update(
            batch, loss=loss, advantage=lambda trajectories, _: [t.turn_returns * 0 + 1 for t in trajectories]
        )
        assert ones["loss/n"] > 0
        assert "clip_fraction" not in ones
        run.publish()
        batch = run.prepare_batch()
        assert batch is not None
        assert "clip_fraction" in run.update(batch)
        run.publish()


def test_advantages_of_one_step_are_refused_where_the_divergence_is_a_part_of_the_returns(s: Setup) -> None:
    """It would be left out of them without a word."""
    with opening(s, algorithm=Algorithm(kl="reward", kl_coef=0.1)) as run:
        batch = run.prepare_batch()
        assert batch is not None
        with pytest.raises(UserError, match="update: advantage cannot be used with estimator gae or kl: reward"):
            run.update(batch, advantage=lambda trajectories, _: [t.turn_returns for t in trajectories])
        assert "kl_reference" in run.update(batch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pass", "ended without a call of agentrl.training"),
        ("import agentrl\nwith agentrl.training({}) as run: pass", "ended after step 0 of 3"),
        (
            "import agentrl\nwith agentrl.training({}): \n  with agentrl.training({}): pass",
            "has opened its run already",
        ),
    ],
)
def test_scripts_that_do_not_train_are_refused(s: Setup, tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(text)
    with pytest.raises(UserError, match=message):
        run_script([str(script)], partial(opening, s))


def test_a_missing_script_is_refused(s: Setup) -> None:
    with pytest.raises(UserError, match=r"absent.py does not exist"):
        run_script(["absent.py"], partial(opening, s))


def test_a_script_that_is_told_to_stop_ends_without_an_error(s: Setup, tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT)
    s.stop.set()
    assert not run_script([str(script), "--fast"], partial(opening, s))


def test_a_step_is_profiled_where_the_config_says_so(s: Setup) -> None:
    assert s.train(profile_steps=[2])
    made = list((s.config.run_dir / "profiles").iterdir())
    assert made == [profile_path(s.config.run_dir, 2, 0)]
    names = {event.get("name") for event in json.loads(gzip.decompress(made[0].read_bytes()))["traceEvents"]}
    assert {"aten::embedding", "Optimizer.step#AdamW.step"} <= names
