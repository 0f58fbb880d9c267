"""`checkpoint_every: auto`: how often writing checkpoints is worth its time."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.configs.trainer_config import Auto

SHARE = 0.05
"""Writing checkpoints takes at most this share of the time."""
MOST = 50
"""Steps after which a checkpoint is due, whatever it costs."""


@dataclass(slots=True)
class CheckpointPace:
    """Decides after each step whether its checkpoint is due. Every rank asks rank 0's.

    `auto`: the first step of a trainer, which measures; then as soon as the steps since the last checkpoint have taken
    1 / SHARE times what writing it took. While one is written none is due, so steps do not wait for it, except after
    MOST steps.
    """

    every: int | Auto
    write_s: float | None = None  # what the last checkpoint took
    steps: int = 0  # since the last checkpoint
    elapsed_s: float = 0.0  # what those took
    writing: bool = False

    def stepped(self, number: int, step_s: float) -> bool:
        """Count a step that took `step_s`; whether its checkpoint is due."""
        self.steps += 1
        self.elapsed_s += step_s
        if self.every != "auto":
            return number % self.every == 0
        if self.steps >= MOST:
            return True
        return not self.writing and (self.write_s is None or self.elapsed_s >= self.write_s / SHARE)

    @property
    def waits(self) -> bool:
        """Whether a step is completed only when its checkpoint is durable: no step is ever trained again."""
        return self.every == 1

    def begun(self) -> None:
        """A checkpoint is being written: count the steps from here."""
        self.steps, self.elapsed_s, self.writing = 0, 0.0, True

    def written(self, write_s: float) -> None:
        """A checkpoint was written, in `write_s`. Any thread may call it."""
        self.write_s, self.writing = write_s, False
