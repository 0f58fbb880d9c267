"""Who teaches each trajectory of a step, and what the teacher reads.

    group ─► its source of tasks ─► teacher ─┬─ none: not taught
                                             └─ what it reads: the trajectory, or the same after another prompt
                                                  └─► its logprobs: of a model (scoring.py), or of a server

T: tokens of a trajectory, T': tokens that the teacher reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agentrl.configs.episodes.teachers import teachers_of
from agentrl.domain.schemas import Float32, TrajectoryTokens
from agentrl.trainer.packing import Taught

Reads = Callable[[Sequence[TrajectoryTokens]], Sequence[TrajectoryTokens | None]]
"""The tokens that each trajectory's teacher reads; None for a trajectory that is not taught."""
Ask = Callable[[str, Sequence[TrajectoryTokens]], Sequence[Float32]]
"""(server, what it reads) → (T',) its logprobs at sampled tokens, 0 elsewhere. Collective."""


class Lessons:
    """The lessons of one step. `teacher` teaches all groups; with a mapping, those whose source in `sources` is in it.

    Without `reads` teachers read what the policy read. `ask` is there where a teacher is a server.
    """

    def __init__(
        self,
        teacher: str | Mapping[str, str],
        sources: Mapping[str, str] | None = None,
        reads: Reads | None = None,
        ask: Ask | None = None,
    ) -> None:
        self.teachers = teachers_of(teacher)
        self._teacher, self._sources = teacher, sources or {}
        self._reads, self._ask = reads, ask

    def of(self, trajectories: Sequence[TrajectoryTokens]) -> list[Taught | None]:
        """Who teaches each trajectory, and what the teacher reads."""
        names = [self._teacher_of(one) for one in trajectories]
        found: list[Taught | None] = [None] * len(trajectories)
        taught = [i for i, name in enumerate(names) if name is not None]
        own = [trajectories[i] for i in taught]
        for i, tokens in zip(taught, own if self._reads is None else self._reads(own), strict=True):
            name = names[i]
            found[i] = None if tokens is None or name is None else Taught(name, tokens)
        return found

    def asked(self, server: str, read: Sequence[TrajectoryTokens]) -> Sequence[Float32]:
        """(T',) a server's logprobs at the sampled tokens of what it reads. Collective."""
        assert self._ask is not None
        return self._ask(server, read)

    def _teacher_of(self, one: TrajectoryTokens) -> str | None:
        if isinstance(self._teacher, str):
            return self._teacher
        return self._teacher.get(self._sources.get(one.group_id, ""))


def not_taught(one: TrajectoryTokens) -> Float32:
    """(T,) the logprobs of no teacher: NaN."""
    return np.full(one.length, np.nan, np.float32)


def moved(scores: Float32, one: TrajectoryTokens) -> Float32:
    """(T,) what a teacher made of (T',) tokens that it read, at the trajectory's tokens; 0 before the first sampled
    one, from which on both are equal.
    """
    first = first_sampled(one)
    found = np.zeros(one.length, np.float32)
    found[first:] = scores[len(scores) - (one.length - first) :]
    return found


def first_sampled(one: TrajectoryTokens) -> int:
    """The position of the first token that the policy sampled."""
    return int(np.flatnonzero(one.turn_ids >= 0)[0])
