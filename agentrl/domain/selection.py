"""Parses the options by which a command selects rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.domain.schemas import InteractionStatus, StepState, TrajectoryState
from agentrl.errors import UserError, did_you_mean

STATES: dict[str, tuple[str, ...]] = {
    "trajectories": tuple(s.value for s in TrajectoryState),
    "tokens": tuple(s.value for s in TrajectoryState),
    "interactions": tuple(s.value for s in InteractionStatus),
    "steps": tuple(s.value for s in StepState),
    "rewards": (),
}
"""The kinds of rows that can be exported → the states of such rows."""

_RANGE = re.compile(r"(\d+)|(\d+)?\.\.(\d+)?")


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps `first` to `last`, both included; `last` None means the newest."""

    first: int
    last: int | None

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """`5`, `3..7`, `3..` or `..7`. Raises UserError naming --steps."""
        found = _RANGE.fullmatch(text.strip())
        if found is None or text.strip() == "..":
            raise UserError(f"--steps: {text!r} is not a range of steps; write 5, 3..7, 3.. or ..7")
        one, first, last = found.groups()
        steps = cls(int(one), int(one)) if one else cls(int(first or 1), int(last) if last else None)
        if steps.first < 1:
            raise UserError(f"--steps: {text!r}: the first step is 1")
        if steps.last is not None and steps.last < steps.first:
            raise UserError(f"--steps: {text!r} runs backwards; did you mean '{steps.last}..{steps.first}'?")
        return steps

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last or ''}"


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter on rows: no states and no steps select everything."""

    what: str
    states: tuple[str, ...] = ()
    steps: StepRange | None = None

    @classmethod
    def parse(cls, what: str, state: str | None = None, steps: str | None = None) -> Selection:
        """Parse options as typed; `state` is a comma-separated list. Raises UserError naming the option."""
        require_choice("--what", what, STATES)
        states = tuple(part.strip() for part in state.split(",")) if state is not None else ()
        for name in states:
            if not STATES[what]:
                raise UserError(f"--state: {what} have no state")
            require_choice("--state", name, STATES[what])
        return cls(what, states, StepRange.parse(steps) if steps is not None else None)


def require_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError naming the option and the nearest choice."""
    options = list(choices)
    if value not in options:
        raise UserError(f"{option}: {value!r} is not one of its values{did_you_mean(value, options)}")
