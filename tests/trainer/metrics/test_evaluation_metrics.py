"""Results of evaluations reach the sinks at their step, that of the last step too, and again after a resume."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_setup import Died, Setup, until
from sqlalchemy import select, update

from agentrl.configs.evaluation_config import EvalConfig
from agentrl.configs.metrics_config import MetricsConfig
from agentrl.domain.evaluation import Evaluation, Result
from agentrl.domain.sample_metrics import Scored
from agentrl.store.tables import runs
from agentrl.trainer import training_run
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics import evaluation_metrics, metric_sinks
from agentrl.trainer.metrics.evaluation_metrics import EvaluationReports, metrics
from agentrl.trainer.stop import Stop
from agentrl.trainer.stored_lineage import StoredLineage

Got = list[tuple[int, dict[str, float]]]


@pytest.fixture
def setup(tmp_path: Path, tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setattr(evaluation_metrics, "POLL_S", 0.01)
    made = Setup(tmp_path, tiny_model, world)
    changes = {"evaluation": EvalConfig(tasks="t:held_out"), "metrics": MetricsConfig(tensorboard=True)}
    made.config = made.config.model_copy(update=changes)
    with made.proxy:
        yield made


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> Got:
    """What the only sink got of evaluations."""
    found: Got = []

    class Recorder:
        def __init__(self, *_: object) -> None:
            """Like TensorBoard."""

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if of_evaluation := {name: value for name, value in metrics.items() if name.startswith("evaluation/")}:
                found.append((step, of_evaluation))

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(metric_sinks, "TensorBoard", Recorder)
    return found


def finished(setup: Setup) -> bool:
    return setup.query("SELECT status FROM runs") in ([("finished",)], [("completed",)])


def test_each_is_sent_once_and_the_last_is_waited_for(setup: Setup, got: Got) -> None:
    setup.evaluate(0, 0, reward=0.25)

    def worker() -> None:
        until(lambda: finished(setup))
        setup.evaluate(3, 3, episodes=1, reward=0.5)
        setup.evaluate(3, 3, reward=1.0)  # of the first episode the first attempt counts

    playing = threading.Thread(target=worker)
    playing.start()
    assert setup.train()
    playing.join()
    assert [step for step, _ in got] == [0, 3]
    first, last = (found for _, found in got)
    assert first["evaluation/s/reward"] == first["evaluation/s/low"] == first["evaluation/s/high"] == 0.25
    assert first["evaluation/s/perfect"] == 0
    assert last["evaluation/s/low"] < last["evaluation/s/reward"] == 0.75 < last["evaluation/s/high"]
    assert last["evaluation/s/perfect"] == 0.5


def test_a_resumed_trainer_sends_the_newest_evaluations_again(
    setup: Setup, got: Got, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.evaluate(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "publish", lambda t, version, tensors: (_ for _ in ()).throw(Died))
        with pytest.raises(Died):
            setup.train()
    setup.stop.set()  # nor does a stopped trainer wait
    assert not setup.train()
    setup.stop = Stop()
    threading.Thread(target=lambda: (until(lambda: finished(setup)), setup.evaluate(3, 3))).start()
    assert setup.train()
    assert [step for step, _ in got] == [0, 0, 3]


def test_an_evaluation_that_takes_longer_than_two_intervals_is_sent(setup: Setup) -> None:
    setup.config = setup.config.model_copy(update={"metrics": MetricsConfig()})  # the trainer does not tell
    setup.evaluate(0, 0)
    assert setup.train()
    with setup.database.write() as conn:
        config = {**conn.scalars(select(runs.c.config)).one(), "evaluation": {"every": 1}}
        conn.execute(update(runs).values(config=config, published_step=1))
    sent: Got = []
    sink = SimpleNamespace(log=lambda step, metrics: sent.append((step, metrics)))
    reports = EvaluationReports(StoredLineage.of(setup.database, setup.config), sink)  # type: ignore[arg-type]
    setup.evaluate(1, 1, episodes=1)
    reports.send()
    with setup.database.write() as conn:
        conn.execute(update(runs).values(published_step=3))
    setup.evaluate(2, 2)
    setup.evaluate(3, 3)
    reports.send()
    setup.evaluate(1, 1)
    reports.send()
    assert [step for step, _ in sent] == [0, 2, 3, 1]


def test_waiting_for_an_evaluation_ends_after_the_timeout(setup: Setup, got: Got) -> None:
    evaluation = setup.config.evaluation.model_copy(update={"hold_timeout_s": 0.05})
    setup.config = setup.config.model_copy(update={"evaluation": evaluation})
    assert setup.train()
    assert got == []


def test_an_unknown_interval_is_left_out() -> None:
    found = metrics(Evaluation(0, 0, 1, {"s": Result({0: [0.7]})}))
    assert found == {"evaluation/s/reward": 0.7, "evaluation/s/perfect": 0}


def test_the_vote_of_the_samples_is_a_figure() -> None:
    found = metrics(Evaluation(0, 0, 3, {"s": Result({0: [1.0, 1.0, 0.0]}, answers={0: ["a", "a", "b"]})}))
    assert found["evaluation/s/maj@1"] == pytest.approx(2 / 3)
    assert found["evaluation/s/maj@3"] == 1.0


def test_what_agents_measured_is_apart_by_setting() -> None:
    results = {"s": Result({0: [1.0]}, stats={"turns": [1.0, 2.0]}), "t": Result({0: [1.0]}, stats={"turns": [4.0]})}
    found = metrics(Evaluation(0, 0, 2, results))
    assert {name: value for name, value in found.items() if name.startswith("eval-rollout/")} == {
        "eval-rollout/s/turns": 1.5,
        "eval-rollout/t/turns": 4.0,
    }


def test_the_choice_by_a_score_is_a_figure() -> None:
    scores = [Scored(0.1, 1.0), Scored(0.3, 0.5)]
    found = metrics(Evaluation(0, 0, 2, {"s": Result({0: [1.1, 0.8]}, choices={0: scores})}))
    assert found["evaluation/s/best_of@1"] == 0.75
    assert found["evaluation/s/best_of@2"] == 0.5
