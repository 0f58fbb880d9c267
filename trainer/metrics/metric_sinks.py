"""Sends a step's metrics to TensorBoard, Weights & Biases and trackio, and tables of rollouts to the last two.

    rank 0's loop ── log(step, metrics or table) ──► a queue and a thread for each sink ──► file, network

`log` never waits for a sink. The next `log` or `close` reports the first error of a sink, once, on the loop's thread.
The sink still receives metrics, and the other sinks and the training go on. This module does not import torch: the
launcher calls `require`.
"""

from __future__ import annotations

import html
import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

from agentrl.configs.metrics_config import MetricsConfig, TrackioConfig, WandbConfig
from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.trainer.metrics import sample_tables
from agentrl.trainer.metrics.sample_tables import SampleTable

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Sink, which is also the name of the extra that installs it → module."""
CLOSE_S = 30.0
"""How long a run waits for its sinks at its end."""
STEP = "step"
"""The metric of Weights & Biases that charts are drawn over."""


Logged = Mapping[str, float] | SampleTable
"""A step's log entry: its metrics, or a table of its rollouts."""


class Sink(Protocol):
    """Receives metrics. Its methods may raise any exception and may be slow."""

    def log(self, step: int, logged: Logged) -> None:
        """Receive the metrics of a step, or a table. A repeated step replaces the earlier one where the sink supports
        that.
        """

    def close(self) -> None:
        """Finish pending work."""


def wanted(config: MetricsConfig) -> list[str]:
    """The sinks that are switched on."""
    return [name for name in PACKAGES if getattr(config, name)]


def require(config: MetricsConfig) -> None:
    """Raise ConfigError for a sink that is switched on and not installed."""
    for name in wanted(config):
        if find_spec(PACKAGES[name]) is None:
            raise ConfigError(f"metrics.{name} needs {PACKAGES[name]}: pip install 'agentrl[{name}]'")


class Sinks:
    """All sinks of a run; `report` gets a sink's name and its first error."""

    def __init__(self, sinks: Mapping[str, Callable[[], Sink]], report: Callable[[str, str], None]) -> None:
        self._feeds = [_Feed(name, make) for name, make in sinks.items()]
        self._report = report

    @classmethod
    def of(cls, config: RunConfig, run_id: str, from_step: int, report: Callable[[str, str], None]) -> Self:
        """The sinks of the configuration. Steps from `from_step` on replace those that an earlier trainer logged."""
        known: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: TensorBoard(config.run_dir / "tensorboard", from_step),
            "wandb": lambda: Wandb(config, run_id),
            "trackio": lambda: Trackio(config, run_id),
        }
        return cls({name: known[name] for name in wanted(config.metrics)}, report)

    @classmethod
    def none(cls) -> Self:
        """No sinks, as on ranks other than 0: `log` and `close` do nothing."""
        return cls({}, lambda *_: None)

    def log(self, step: int, logged: Logged) -> None:
        """Queue the metrics of a step, or of an evaluation after it, or a table of rollouts."""
        for feed in self._feeds:
            feed.waiting.put((step, logged if isinstance(logged, SampleTable) else dict(logged)))
        self._report_errors()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until the sinks have received everything, at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.waiting.put(None)
        for feed in self._feeds:
            feed.thread.join(max(0.0, until - time.monotonic()))
            if feed.thread.is_alive():
                self._report(feed.name, f"it has not taken everything after {timeout_s:g} s")
        self._report_errors()

    def _report_errors(self) -> None:
        for feed in self._feeds:
            if feed.error is not None and not feed.reported:
                feed.reported = True
                self._report(feed.name, f"{type(feed.error).__name__}: {feed.error}")


class _Feed:
    """One sink with its queue and its daemon thread, which does not keep the process alive."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name
        self.waiting: queue.SimpleQueue[tuple[int, Logged] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.reported = False
        self.thread = threading.Thread(target=self._run, args=(make,), name=f"metrics-{name}", daemon=True)
        self.thread.start()

    def _run(self, make: Callable[[], Sink]) -> None:
        sink: Sink | None = self._try(make)
        while (item := self.waiting.get()) is not None:
            if sink is not None:
                self._try(sink.log, *item)
        if sink is not None:
            self._try(sink.close)

    def _try(self, work: Callable[..., Any], *args: object) -> Any:
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001 - code of other projects: the loop reports it, and training goes on
            self.error = self.error or error
            return None


class TensorBoard:
    """Writes event files. TensorBoard then ignores steps from `from_step` on in earlier files."""

    def __init__(self, folder: Path, from_step: int) -> None:
        from tensorboardX import SummaryWriter

        unique = f".{time.time_ns()}"  # names count in seconds: a second file could replace the first
        self._writer = SummaryWriter(str(folder), purge_step=from_step, filename_suffix=unique)

    def log(self, step: int, logged: Logged) -> None:
        """Write one scalar per metric. It shows no tables."""
        if isinstance(logged, SampleTable):
            return
        for name, value in logged.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with our run's id, so that a resume continues it."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        import wandb

        settings = config.metrics.wandb
        assert isinstance(settings, WandbConfig)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            id=run_id,
            name=config.name,
            resume="allow",
            dir=str(config.run_dir),
            config=_shown(config),
        )
        self._run.define_metric("*", step_metric=STEP)  # the step of Weights & Biases cannot go back, ours can

    def log(self, step: int, logged: Logged) -> None:
        """Log one row."""
        if isinstance(logged, SampleTable):
            import wandb

            table = wandb.Table(columns=list(sample_tables.COLUMNS), data=logged.rows)
            self._run.log({STEP: step, sample_tables.NAME: table})
        else:
            self._run.log({STEP: step, **logged})

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


class Trackio:
    """A run of trackio with a unique name, so that a resume continues it."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        import trackio

        settings = config.metrics.trackio
        assert isinstance(settings, TrackioConfig)
        self._run = trackio.init(
            project=settings.project,
            name=f"{config.name}-{run_id[-8:]}",
            space_id=settings.space_id,
            resume="allow",
            config=_shown(config),
            embed=False,
        )

    def log(self, step: int, logged: Logged) -> None:
        """Log one row. trackio shows texts of a table as Markdown with HTML, so these are escaped."""
        if isinstance(logged, SampleTable):
            import trackio

            rows = [{name: _inert(value) for name, value in row.items()} for row in logged.as_dicts()]
            self._run.log({sample_tables.NAME: trackio.Table(data=rows)}, step=step)
        else:
            self._run.log(dict(logged), step=step)

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


def _inert(value: Any) -> Any:
    """Text in which Markdown finds no HTML, link or image."""
    return html.escape(value, quote=False).replace("[", "\\[") if isinstance(value, str) else value


def _shown(config: RunConfig) -> dict[str, Any]:
    """The configuration without the database's URL, which holds a password."""
    return config.model_dump(mode="json", exclude={"database_url"})
