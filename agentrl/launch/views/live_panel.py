"""The terminal output of `agentrl train`: a live panel on a terminal, else one line per event."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain import evaluation
from agentrl.launch.views.snapshot import Snapshot, StepPoint

LINE_EVERY_S = 30.0


ERROR_SHOWN = 160
"""Maximum characters of an error in a line."""


def waiting_for(snapshot: Snapshot, config: RunConfig) -> str:
    """Describe what the run waits for, and its newest error when its last sessions all failed."""
    waits = _waiting_for(snapshot, config)
    if snapshot.failing is None or snapshot.published_step >= snapshot.target_steps:
        return waits
    return f"{waits}; the last sessions all failed: {snapshot.failing[:ERROR_SHOWN]}"


def _waiting_for(snapshot: Snapshot, config: RunConfig) -> str:
    if "serving" not in snapshot.engines.values():
        return "an engine to serve"
    if snapshot.published_step >= snapshot.target_steps:
        return evaluating(snapshot, snapshot.target_steps) if config.is_evaluated else "the end"
    if snapshot.newest_step_state == "started":
        return "the trainer's update"
    if snapshot.newest_step_state == "trained":
        return "engines to load the new weights"
    idle = not snapshot.running_groups and not snapshot.ready_groups
    if config.is_evaluated and snapshot.newest_step_state is None and idle:
        return evaluating(snapshot, 0)
    ready = f"{snapshot.ready_groups} of {config.trainer.groups_per_step} groups ready"
    return f"rollouts: {ready}, {snapshot.running_groups} running"


def evaluating(snapshot: Snapshot, step: int) -> str:
    """The progress of a step's evaluation."""
    found = next((evaluation for evaluation in snapshot.evaluations if evaluation.step == step), None)
    return f"evaluation of step {step}: " + (f"{found.ended} of {found.episodes} episodes" if found else "its start")


class Display:
    """Displays snapshots and notes, each step and evaluation once."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self._started = time.monotonic()
        self._shown_step = -1
        self._shown_evaluation: int | None = None
        self._newest: StepPoint | None = None
        self._shown_line, self._line_at = "", 0.0
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print a permanent line."""
        elapsed = time.monotonic() - self._started
        self.console.print(f"[{elapsed:6.1f} s] {text}", soft_wrap=True)

    def starting(self, text: str) -> None:
        """Show what the first start waits for, on a terminal."""
        if self._live is not None:
            self._live.update(Text(text[: self.console.width], no_wrap=True))

    @property
    def shown_step(self) -> int:
        """The last step that has been printed. `update` needs the points after it."""
        return max(self._shown_step, 0)

    def update(self, snapshot: Snapshot) -> None:
        """Show the run's state, and print a line for each newly finished step."""
        now = time.monotonic()
        rate = snapshot.tokens_per_s
        if self._shown_step < 0:
            self._shown_step = snapshot.published_step
        for point in snapshot.points:
            if self._shown_step < point.step <= snapshot.published_step:
                self.note(step_line(point, snapshot.target_steps))
                self._shown_step, self._newest = point.step, point
        if self._shown_evaluation is None:  # printed before this start
            self._shown_evaluation = max((e.step for e in snapshot.evaluations if e.complete), default=-1)
        for found in snapshot.evaluations:
            if found.complete and found.step > self._shown_evaluation:
                self.note(evaluation.line(found.as_json()))
                self._shown_evaluation = found.step
        waits = waiting_for(snapshot, self.config)
        if self._live is not None:
            self._live.update(self._panel(snapshot, rate, waits))
            return
        kind = waits.partition(":")[0] if snapshot.failing is None else "failures"
        news = kind != self._shown_line and (kind.startswith("evaluation") or kind == "failures")
        if news or now - self._line_at > LINE_EVERY_S:
            self.note(f"{rate:.0f} tokens/s, waiting for {waits}")
            self._shown_line, self._line_at = kind, now

    def _panel(self, snapshot: Snapshot, rate: float, waits: str) -> RenderableType:
        point = snapshot.points[-1] if snapshot.points else self._newest
        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"step {snapshot.published_step}/{snapshot.target_steps}",
            ProgressBar(total=snapshot.target_steps, completed=snapshot.published_step, width=30),
            f"reward {point.reward:.3f}" if point else "reward –",
            f"staleness {point.staleness_max}" if point else "staleness –",
            f"{rate:.0f} tokens/s",
        )
        beside = [evaluation.line(found.as_json()) for found in snapshot.evaluations if not found.complete]
        texts = [f"waiting for {waits}", *(line for line in beside if line != waits)]
        return Group(table, *(Text(text, style="dim") for text in texts))


def step_line(point: StepPoint, target: int) -> str:
    """Format one finished step."""
    return (
        f"step {point.step}/{target}  reward {point.reward:.3f}  staleness ≤ {point.staleness_max}  "
        f"{point.tokens_trained} tokens of {point.trajectories} trajectories"
    )
