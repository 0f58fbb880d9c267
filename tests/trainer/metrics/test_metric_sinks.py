"""Metrics on their way to TensorBoard, W&B and trackio: in order, beside the training, continued by a resume."""

from __future__ import annotations

import struct
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from loop_setup import Died, Setup

from agentrl.configs.metrics_config import MetricsConfig
from agentrl.errors import ConfigError
from agentrl.store import events
from agentrl.store.training import sample_rows, steps
from agentrl.store.training.sample_rows import SampledRollout
from agentrl.trainer.metrics import metric_sinks, sample_tables
from agentrl.trainer.metrics.metric_sinks import Logged, Sinks
from agentrl.trainer.metrics.sample_tables import SampleTable
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.stored_lineage import StoredLineage

EVERYWHERE = MetricsConfig(tensorboard=True, wandb={"project": "p", "entity": "e"}, trackio={"project": "q"})


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, logged: Logged) -> None:
        assert not isinstance(logged, SampleTable)
        self.got.append((step, dict(logged)))

    def close(self) -> None:
        self.closed = True


class Broken(Recorder):
    """One that fails at every step but the first."""

    def log(self, step: int, logged: Logged) -> None:
        super().log(step, logged)
        if step > 1:
            raise ConnectionError(f"no route at step {step}")


def test_everything_arrives_in_order() -> None:
    recorder, said = Recorder(), []
    opened = Sinks({"a": lambda: recorder}, lambda *problem: said.append(problem))
    for step in (1, 2, 3):
        opened.log(step, {"loss": float(step)})
    opened.close()
    assert recorder.got == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})]
    assert recorder.closed
    assert not said


def test_a_failing_sink_is_reported_once_still_fed_and_does_not_affect_other_sinks() -> None:
    broken, well, said = Broken(), Recorder(), []
    opened = Sinks({"broken": lambda: broken, "well": lambda: well}, lambda *problem: said.append(problem))
    for step in (1, 2, 3):
        opened.log(step, {})
    opened.close()
    assert said == [("broken", "ConnectionError: no route at step 2")]
    assert [step for step, _ in broken.got] == [step for step, _ in well.got] == [1, 2, 3]


def test_a_sink_that_cannot_be_opened_is_reported() -> None:
    def refuse() -> Recorder:
        raise PermissionError("no key")

    said: list[tuple[str, ...]] = []
    opened = Sinks({"a": refuse}, lambda *problem: said.append(problem))
    opened.log(1, {})
    opened.close()
    assert said == [("a", "PermissionError: no key")]


def test_a_hanging_sink_does_not_block_the_loop() -> None:
    free = threading.Event()
    said: list[tuple[str, ...]] = []
    opened = Sinks(
        {"a": lambda: SimpleNamespace(log=lambda *_: free.wait(), close=free.wait)},
        lambda *problem: said.append(problem),
    )
    for step in range(100):
        opened.log(step, {})
    opened.close(timeout_s=0.1)
    assert said == [("a", "it has not taken everything after 0.1 s")]
    free.set()


@pytest.mark.parametrize(
    ("section", "extra"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_package_is_refused_with_the_name_of_its_extra(
    monkeypatch: pytest.MonkeyPatch, section: str, extra: str
) -> None:
    monkeypatch.setattr(metric_sinks, "find_spec", lambda _: None)
    metric_sinks.require(MetricsConfig())
    with pytest.raises(ConfigError, match=rf"^metrics.{section} needs \w+: pip install 'agentrl\[{extra}\]'$"):
        metric_sinks.require(MetricsConfig(**{section: EVERYWHERE.model_dump()[section]}))


class Service:
    """Stands in for `wandb` and `trackio`: what a program did with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []
        self.finished = 0
        self.down: Exception | None = None
        module = ModuleType(name)
        module.init = self._init  # type: ignore[attr-defined]
        module.Table = lambda **given: ("table", given)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)

    def _init(self, **given: Any) -> Any:
        self.inits.append(given)
        return SimpleNamespace(log=self._log, finish=self._finish, define_metric=self._axis)

    def _log(self, row: dict[str, Any], step: int | None = None) -> None:
        if self.down:
            raise self.down
        self.rows.append(row if step is None else {"step": step, **row})

    def _axis(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def _finish(self) -> None:
        self.finished += 1


@pytest.fixture
def n_steps() -> int:
    return 4


def use(setup: Setup, config: MetricsConfig) -> None:
    setup.config = setup.config.model_copy(update={"metrics": config})


def die_in_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its publish: it is complete."""
    real = Publisher.publish

    def publish(self: Publisher, version: int, *args: Any) -> bool:
        if version == number:
            raise Died
        return real(self, version, *args)

    monkeypatch.setattr(Publisher, "publish", publish)


def roll_a_step_back(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Train four steps; the third, which has no checkpoint, twice. The metrics of those that survive."""
    with monkeypatch.context() as patch:
        die_in_step(3, patch)
        with pytest.raises(Died):
            setup.train(checkpoint_every=2)
    assert setup.train(checkpoint_every=2)
    return [row.metrics for row in setup.database.query(steps.of_run, setup.run_id)]


@pytest.mark.parametrize("name", ["wandb", pytest.param("trackio", marks=pytest.mark.long)])
def test_a_resume_continues_the_same_run(setup: Setup, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    service = Service(monkeypatch, name)
    use(setup, MetricsConfig(**{name: EVERYWHERE.model_dump()[name]}))
    survived = roll_a_step_back(setup, monkeypatch)
    first, second = service.inits
    assert first == second
    assert first["resume"] == "allow"
    assert "database_url" not in first["config"]
    assert setup.run_id[-8:] in str(first.get("id", first["name"]))
    assert [row["step"] for row in service.rows] == [1, 2, 3, 2, 3, 4]
    newest = {row["step"]: row["loss"] for row in service.rows}
    assert newest == {i: metrics["loss"] for i, metrics in enumerate(survived, 1)}
    assert service.finished == 2
    if name == "wandb":
        assert (first["project"], first["entity"], first["mode"]) == ("p", "e", "online")
        assert service.axes == [("*", "step")] * 2
    else:
        assert first["project"] == "q"


@pytest.mark.parametrize("name", ["wandb", pytest.param("trackio", marks=pytest.mark.long)])
def test_every_nth_step_sends_a_table_of_a_few_rollouts(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    service = Service(monkeypatch, name)
    sections = {name: EVERYWHERE.model_dump()[name], "samples": {"every": 2, "count": 3}}
    use(setup, MetricsConfig(**sections))
    assert setup.train()
    tables = {row["step"]: row["samples"][1] for row in service.rows if "samples" in row}
    assert list(tables) == [2, 4]
    for step, given in tables.items():
        rows = given["data"]
        assert len(rows) == 3
        if name == "wandb":
            assert given["columns"] == list(sample_tables.COLUMNS)
            rows = [dict(zip(given["columns"], row, strict=True)) for row in rows]
        known = {one.session_id: one for one in sampled(setup, step)}
        for row in rows:
            stored = known[row["session"]]
            assert (row["step"], row["group"], row["reward"]) == (step, stored.group_id, stored.reward)
            assert (row["return"], row["advantage"], row["age"]) == (
                stored.episode_return,
                stored.advantage,
                stored.age,
            )
    assert [row["step"] for row in service.rows if "loss" in row] == [1, 2, 3, 4]


def sampled(setup: Setup, step: int) -> list[SampledRollout]:
    (row,) = (row for row in setup.database.query(steps.of_run, setup.run_id) if row.step == step)
    return setup.database.query(sample_rows.read, row.id, 1000)


def test_a_service_that_takes_no_tables_stops_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    service = Service(monkeypatch, "trackio")
    monkeypatch.delattr(sys.modules["trackio"], "Table")
    use(setup, MetricsConfig(trackio={"project": "q"}, samples={"every": 1}))
    assert setup.train()
    assert [row["step"] for row in service.rows] == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("metrics.trackio: AttributeError") == 1


def test_training_goes_on_without_a_service(setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    service = Service(monkeypatch, "wandb")
    service.down = OSError("the network is unreachable")
    use(setup, MetricsConfig(wandb={"project": "p"}))
    assert setup.train()
    (event,) = setup.database.query(events.of_run, setup.run_id, "sink_failed")
    assert (event.data["sink"], event.data["error"]) == ("wandb", "OSError: the network is unreachable")
    assert capsys.readouterr().out.count("metrics.wandb: OSError: the network is unreachable; training goes on") == 1


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag → step → value, of the event files as TensorBoard reads them: a session's start drops what it says anew."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                found = {tag: {s: v for s, v in of.items() if s < event.step} for tag, of in found.items()}
            for value in event.summary.value:
                of_tag = found.setdefault(value.tag, {})
                assert event.step not in of_tag, "a step twice"
                of_tag[event.step] = value.simple_value
    return found


def test_tensorboard_shows_the_surviving_steps_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    use(setup, MetricsConfig(tensorboard=True))
    survived = roll_a_step_back(setup, monkeypatch)
    shown = scalars(setup.config.run_dir / "tensorboard")
    assert shown.keys() == {name for metrics in survived for name in metrics}
    for name, values in shown.items():
        expected = {i: pytest.approx(m[name], rel=1e-6) for i, m in enumerate(survived, 1) if name in m}
        assert values == expected, name


def test_without_sinks_nothing_is_started(setup: Setup) -> None:
    assert StoredLineage.of(setup.database, setup.config).run_id == setup.run_id
    before = threading.active_count()
    opened = Sinks.of(setup.config, setup.run_id, 1, lambda *_: None)
    assert threading.active_count() == before
    opened.close()
