"""The trainer's turns on the engines' GPUs: a step has their memory, and nothing else has; a lost lease ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_setup import Died, Setup, until

from agentrl.configs.evaluation_config import EvalConfig
from agentrl.configs.resources_config import Resources
from agentrl.errors import StoreError
from agentrl.store.training import memory_leases
from agentrl.trainer import training_run
from agentrl.trainer.publish import publish_client
from agentrl.trainer.run import lease_renewal, publish_step
from agentrl.trainer.run.lease_renewal import Renewal
from agentrl.trainer.stored_lineage import StoredLineage

TURN = ["release", "publish"]


@pytest.fixture
def n_steps() -> int:
    return 2


@pytest.fixture
def setup(setup: Setup) -> Setup:
    setup.config = setup.config.model_copy(update={"resources": Resources(colocated=True)})
    return setup


def held(setup: Setup) -> bool:
    return setup.database.query(memory_leases.is_held, setup.run_id)


def seen_at(setup: Setup, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[bool]:
    """Whether it is the trainer's turn at each call of a function."""
    found: list[bool] = []
    real = getattr(owner, name)

    def seeing(*args: Any, **kwargs: Any) -> Any:
        found.append(held(setup))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, seeing)
    return found


def test_the_trainer_has_the_engines_memory_in_steps_and_not_while_it_waits(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = seen_at(setup, monkeypatch, StoredLineage, "wait_for_batch")
    computing = seen_at(setup, monkeypatch, training_run, "update_policy")
    completing = seen_at(setup, monkeypatch, StoredLineage, "complete")
    assert setup.train()
    assert setup.proxy.turns == TURN * 2
    assert (waiting, computing, completing) == ([False, False], [True, True], [True, True])
    assert not held(setup)
    assert [n for (n,) in setup.query("SELECT count(*) FROM events WHERE kind = 'wait_for_engines'")] == [2]


@pytest.mark.parametrize(
    "resources", [Resources(), Resources(colocated=False), Resources(colocated=True, divide_memory=True)]
)
def test_engines_keep_their_memory_without_turns(setup: Setup, resources: Resources) -> None:
    setup.config = setup.config.model_copy(update={"resources": resources})
    assert setup.train()
    assert setup.proxy.turns == ["publish"] * 2


def test_a_failed_step_keeps_the_lease_without_renewing_it(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise Died

    monkeypatch.setattr(training_run, "update_policy", fails)
    before = threading.active_count()
    with pytest.raises(Died):
        setup.train()
    assert held(setup)  # the memory is free when the process has ended
    until(lambda: threading.active_count() <= before)
    monkeypatch.undo()
    assert setup.train()  # the next trainer takes the turn over
    assert setup.proxy.turns == ["release", *TURN * 2]


@pytest.fixture
def evaluated(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(publish_step, "POLL_S", 0.01)
    evaluation = EvalConfig(tasks="t:held_out", every=2, hold=True)
    setup.config = setup.config.model_copy(update={"evaluation": evaluation})
    return setup


def test_engines_are_given_back_for_an_evaluation_that_holds_a_publish(evaluated: Setup) -> None:
    """The evaluation is sampled by the engines, from the version that they served before the step."""

    def workers() -> None:
        until(lambda: evaluated.proxy.turns == ["release", "reload"])
        evaluated.evaluate(0, 0)

    playing = threading.Thread(target=workers)
    playing.start()
    assert evaluated.train()
    playing.join()
    assert evaluated.proxy.turns[:3] == ["release", "reload", "publish"]


def test_a_trainer_that_is_told_to_stop_does_not_wait_for_engines(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(publisher: publish_client.Publisher, *_: Any) -> str:
        setup.stop.set()
        return "engines are starting"

    monkeypatch.setattr(publish_client.Publisher, "_post", refuses)
    assert not setup.train()
    assert setup.steps()[0][1] == "started"
    assert "taking the GPUs from the engines: engines are starting" in setup.said[0]


def renewal(renew: Callable[[], bool], renewed_at: float, ended: list[int]) -> Renewal:
    return Renewal(renew, renewed_at, ended.append, every_s=0.01)


def test_a_lease_that_is_over_ends_the_process() -> None:
    ended: list[int] = []
    renewal(lambda: False, time.monotonic(), ended)
    until(lambda: ended == [lease_renewal.LOST_STATUS])


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_lease_that_cannot_be_renewed_ends_the_process_in_time(how: str) -> None:
    ended: list[int] = []
    over = threading.Event()

    def renew() -> bool:
        if how == "hangs":
            over.wait()
        raise StoreError("away")

    nearly = time.monotonic() - lease_renewal.LEASE_S + lease_renewal.EXIT_BEFORE_S + 0.2
    renewal(renew, nearly, ended)
    until(lambda: ended == [lease_renewal.LOST_STATUS])
    assert time.monotonic() >= nearly + lease_renewal.LEASE_S - lease_renewal.EXIT_BEFORE_S
    over.set()


def test_a_database_that_comes_back_in_time_renews_the_lease() -> None:
    ended: list[int] = []
    answers: list[StoreError] = [StoreError("away")]
    asked: list[int] = []

    def renew() -> bool:
        asked.append(1)
        if answers:
            raise answers.pop()
        return True

    running = renewal(renew, time.monotonic(), ended)
    until(lambda: len(asked) > 3)
    running.stop()
    assert not ended


def test_a_stopped_renewal_does_not_end_the_process(tmp_path: Path) -> None:
    ended: list[int] = []
    running = renewal(lambda: True, time.monotonic(), ended)
    running.stop()
    until(lambda: not any(thread.name == "memory-lease" for thread in threading.enumerate()))
    assert not ended
