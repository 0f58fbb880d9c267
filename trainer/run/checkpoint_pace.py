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
    1 / SHARE times what writing it took, and at the latest after MOST steps.
    """

    every: int | Auto
    write_s: float | None = None  # what the last checkpoint took
    steps: int = 0  # since the last checkpoint
    elapsed_s: float = 0.0  # what those took

    def stepped(self, number: int, step_s: float) -> bool:
        """Count a step that took `step_s`; whether its checkpoint is due."""
        self.steps += 1
        self.elapsed_s += step_s
        if self.every != "auto":
            return number % self.every == 0
        return self.write_s is None or self.steps >= MOST or self.elapsed_s >= self.write_s / SHARE

    @property
    def waits(self) -> bool:
        """Whether the checkpoint that is due must be durable before the step is completed: every step leaves one, or
        the first one is measured. Ask before `written`.
        """
        return self.every == 1 or (self.every == "auto" and (self.steps == 1 or self.write_s is None))

    def begun(self) -> None:
        """A checkpoint is being written: count the steps from here."""
        self.steps, self.elapsed_s = 0, 0.0

    def written(self, write_s: float) -> None:
        """A checkpoint was written, in `write_s`."""
        self.write_s = write_s
