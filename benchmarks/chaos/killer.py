"""Plans from a seed which part of a run is killed when, and carries out the plan."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from chaos.run import SUPERVISOR, Position, Run

FREQUENT = ("trainer", "proxy", "rollout")
SELDOM = ("engine", SUPERVISOR)
"""Parts that are killed seldom, because their restart includes the start of an engine."""
SELDOM_SHARE = 0.2
EARLY_SHARE = 0.3
"""The share of kills that do not wait for the run to recover from the previous kill."""
CALM_S, EARLY_S = 3.0, 1.5
AIMS, AIM_WEIGHTS = (None, "started", "trained"), (5, 3, 2)
"""States of the newest step that a kill waits for, and their weights: steps are short, so random kills seldom hit one.
"""
MORE_STEPS = 10

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned kill: `pause_s` after the run has recovered (if `early`, after the last kill), once the step is in
    `state`.
    """

    part: str
    early: bool
    pause_s: float
    state: str | None  # of the newest optimizer step; None: any


@dataclass(frozen=True, slots=True)
class Kill:
    """An executed kill."""

    at_s: float  # since the start of the run
    part: str
    early: bool
    step: int  # the last published step
    state: str  # of the newest optimizer step

    def __str__(self) -> str:
        early = ", without waiting" if self.early else ""
        return f"{self.at_s:.1f} s: {self.part} at step {self.step} ({self.state}{early})"


@dataclass(slots=True)
class Outcome:
    """The kills of a run. `recovery_s`: (part, seconds from its kill to the next published step)."""

    kills: list[Kill] = field(default_factory=list)
    recovery_s: list[tuple[str, float]] = field(default_factory=list)
    prolonged: int = 0  # how often the run finished before all kills were done and was given more steps


def plan(seed: int, count: int) -> list[Planned]:
    """Plan `count` kills: a fifth of them for the SELDOM parts, the others about evenly over the other parts."""
    rng = random.Random(f"kills/{seed}")
    n_seldom = int(count * SELDOM_SHARE)
    names = [SELDOM[(seed + i) % len(SELDOM)] for i in range(n_seldom)]
    while len(names) < count:
        names += rng.sample(FREQUENT, min(len(FREQUENT), count - len(names)))
    rng.shuffle(names)
    return [planned(rng, name) for name in names]


def planned(rng: random.Random, part: str) -> Planned:
    """Plan one kill at a random moment."""
    early = rng.random() < EARLY_SHARE
    aim = rng.choices(AIMS, AIM_WEIGHTS)[0]
    return Planned(part, early, rng.expovariate(1 / (EARLY_S if early else CALM_S)), None if early else aim)


def disturb(run: Run, kills: Sequence[Planned], outcome: Outcome, say: Say) -> None:
    """Start the run, carry out the kills in turn, and let the run finish. Raises RunFailed; `outcome` then has the
    kills so far.
    """
    started = time.monotonic()
    run.start()
    for number, to_do in enumerate(kills, 1):
        positions = _going(run, outcome, say)
        if not to_do.early:
            _recover(outcome, positions, started)
        time.sleep(to_do.pause_s)
        position = next(p for p in positions if to_do.state in (None, p.state) and run.kill(to_do.part))
        outcome.kills.append(Kill(time.monotonic() - started, to_do.part, to_do.early, *position))
        say(f"kill {number}/{len(kills)}: {to_do.part} at step {position.step} of {run.steps} ({position.state})")
    _recover(outcome, run.follow(), started)
    for _ in run.follow():
        pass


def _going(run: Run, outcome: Outcome, say: Say) -> Iterator[Position]:
    """Yield the run's position forever: a finished run is given more steps."""
    while True:
        yield from run.follow()
        run.steps += MORE_STEPS
        outcome.prolonged += 1
        say(f"finished too early: going on to step {run.steps}")
        run.start()


def _recover(outcome: Outcome, positions: Iterator[Position], started: float) -> None:
    """Wait for the first step that is published after the last kill."""
    last = outcome.kills[-1] if outcome.kills else None
    for position in positions:
        if position.step > (last.step if last else 0):
            if last:
                outcome.recovery_s.append((last.part, time.monotonic() - started - last.at_s))
            return
