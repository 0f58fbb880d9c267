"""`evaluation.hold`: versions are published only when those before them are evaluated, also after kill -9."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_setup import Died, Setup, until

from agentrl.configs.evaluation_config import EvalConfig
from agentrl.store import evaluation_episodes, runs
from agentrl.trainer.distributed import World
from agentrl.trainer.run import publish_step
from agentrl.trainer.stop import Stop


@pytest.fixture
def setup(tmp_path: Path, tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setattr(publish_step, "POLL_S", 0.01)
    made = Setup(tmp_path, tiny_model, world)
    evaluation = EvalConfig(tasks="t:held_out", every=2, hold=True)
    made.config = made.config.model_copy(update={"evaluation": evaluation})
    with made.proxy:
        yield made


def published(setup: Setup) -> int:
    return int(setup.database.query(runs.get, setup.run_id).published_step)


def waits(setup: Setup) -> list[int]:
    """The versions that each ended wait was for."""
    return [
        int(row[0]) for row in setup.query("SELECT data ->> 'version' FROM events WHERE kind = 'wait_for_evaluation'")
    ]


def states(setup: Setup) -> list[tuple[int, str]]:
    return [(step, state) for step, state, _, _ in setup.steps()]


def test_a_version_is_published_after_the_one_before_it_is_evaluated(setup: Setup) -> None:
    seen: list[tuple[int, list[tuple[int, str]]]] = []

    def workers() -> None:
        until(lambda: (1, "trained") in states(setup))
        setup.evaluate(0, 0, episodes=1)
        seen.append((published(setup), states(setup)))
        setup.evaluate(0, 0)
        until(lambda: (3, "trained") in states(setup))  # step 1 is not evaluated
        seen.append((published(setup), states(setup)))
        setup.evaluate(2, 2)

    playing = threading.Thread(target=workers)
    playing.start()
    assert setup.train()
    playing.join()
    assert seen == [(0, [(1, "trained")]), (2, [(1, "published"), (2, "published"), (3, "trained")])]
    assert published(setup) == 3
    assert waits(setup) == [1, 2, 3]


def test_a_trainer_killed_while_it_waits_waits_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(publish_step, "wait_for_evaluation", lambda *_: (_ for _ in ()).throw(Died))
        with pytest.raises(Died):
            setup.train()
    assert (published(setup), states(setup)) == (0, [(1, "trained")])
    held: list[int] = []

    def workers() -> None:
        until(lambda: setup.query("SELECT 1 FROM runs WHERE trainer_epoch = 2"))
        held.append(published(setup))
        setup.evaluate(0, 0)
        until(lambda: (3, "trained") in states(setup))
        setup.evaluate(2, 2)

    playing = threading.Thread(target=workers)
    playing.start()
    assert setup.train()
    playing.join()
    assert held == [0]
    assert states(setup) == [(1, "published"), (2, "published"), (3, "published")]


def test_waiting_for_an_evaluation_ends_after_the_timeout(setup: Setup) -> None:
    evaluation = setup.config.evaluation.model_copy(update={"hold_timeout_s": 0.05})
    setup.config = setup.config.model_copy(update={"evaluation": evaluation})
    assert setup.train()
    assert published(setup) == 3


def test_a_stopped_trainer_does_not_wait_and_the_next_one_publishes(setup: Setup) -> None:
    def stop() -> None:
        until(lambda: (1, "trained") in states(setup))
        setup.stop.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert not setup.train()
    stopping.join()
    assert (published(setup), states(setup)) == (0, [(1, "trained")])
    setup.evaluate(0, 0)
    setup.evaluate(2, 2)
    setup.stop = Stop()
    assert setup.train()
    assert published(setup) == 3


@pytest.mark.parametrize("changes", [{"evaluation": EvalConfig(hold=True)}, {"agent": None}])
def test_a_run_without_evaluation_does_not_hold_versions(setup: Setup, changes: dict[str, Any]) -> None:
    setup.config = setup.config.model_copy(update=changes)
    assert setup.train()
    assert published(setup) == 3


def test_versions_that_were_rolled_back_do_not_hold_later_ones(setup: Setup) -> None:
    def held(version: int) -> bool:
        return setup.database.query(evaluation_episodes.paused, setup.run_id, version, setup.config)

    assert held(1)
    assert not held(0)  # they are served already
    with setup.database.write() as conn:
        conn.exec_driver_sql("UPDATE weight_versions SET state = 'rolled_back' WHERE version = 0")
    assert not held(1)
