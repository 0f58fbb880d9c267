"""The groups of a generated run: what becomes of each, when it is sampled, and for which task."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .run_timeline import Timeline

GROUP = 8
MIN_GROUP = 2
UNTRAINED = {"stale": 0.05, "rejected": 0.10}
"""Shares of all groups."""
FILTERED = ("too easy", "too hard", "reward hacking suspected")
"""Why a filter rejects a group; None: too few of its sessions completed."""
READY, RUNNING = 24, 32
"""Groups that wait for a lease, and that are sampled now, of a run of 800 steps."""
STEPS = 800
EVALUATIONS = 16
EVALUATED_TASKS = 64
SETTINGS = {"sampled": 1.0, "greedy": 0.0}
"""Setting of an evaluation → temperature."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group of sessions. `step` leased it; `reason` is why it is stale or rejected."""

    state: str
    begin: float
    end: float  # of its longest session
    step: int | None = None
    reason: str | None = None
    evaluation: tuple[int, int, str, int] | None = None  # step, episodes, setting, index of the task


@dataclass(frozen=True, slots=True)
class Shape:
    """The counts of groups in a run."""

    steps: int
    per_step: int
    stale: int
    rejected: int
    ready: int
    running: int
    evaluations: int
    evaluated_tasks: int

    @classmethod
    def of(cls, groups: int) -> Shape:
        """The shape of a run with about this number of training groups."""
        stale, rejected = (max(2, round(share * groups)) for share in UNTRAINED.values())
        size = min(1.0, groups / 10_000)
        ready, running = max(2, round(READY * size)), max(3, round(RUNNING * size))
        trained = max(4, groups - stale - rejected - ready - running)
        per_step = max(2, round(trained / STEPS))
        steps = max(2, trained // per_step - 1)
        evaluated = max(2, round(EVALUATED_TASKS * size))
        return cls(steps, per_step, stale, rejected, ready, running, min(EVALUATIONS, steps), evaluated)


def plans(shape: Shape, timeline: Timeline, seed: int) -> list[GroupPlan]:
    """Every group, oldest first."""
    rng = random.Random(f"{seed}/groups")
    found = [
        _sampled(rng, timeline, "leased" if step > shape.steps else "trained", timeline.at(step), step)
        for step in range(1, shape.steps + 2)
        for _ in range(shape.per_step)
    ]
    found += [_sampled(rng, timeline, "ready", timeline.now) for _ in range(shape.ready)]
    found += [
        _sampled(
            rng, timeline, "stale", timeline.at(rng.uniform(2, shape.steps)), reason=rng.choice(("tied", "too_old"))
        )
        for _ in range(shape.stale)
    ]
    for _ in range(shape.rejected):
        reason = rng.choice((None, None, *FILTERED))
        found.append(_sampled(rng, timeline, "rejected", timeline.at(rng.uniform(2, shape.steps)), reason=reason))
    for _ in range(shape.running):
        begin = timeline.now - rng.uniform(0.05, 2.0) * timeline.step_s
        found.append(GroupPlan("running", begin, begin + rng.uniform(2.2, 4.0) * timeline.step_s))
    found += _evaluated(rng, shape, timeline)
    return sorted(found, key=lambda plan: plan.begin)


def _sampled(
    rng: random.Random,
    timeline: Timeline,
    state: str,
    before: float,
    step: int | None = None,
    reason: str | None = None,
) -> GroupPlan:
    """A group that ended shortly before a time."""
    end = before - rng.uniform(0.02, 0.35) * timeline.step_s
    length = min(6.0, 0.5 * rng.lognormvariate(0.0, 0.9) + 0.1) * timeline.step_s
    return GroupPlan(state, max(timeline.start + 1.0, end - length), end, step, reason)


def _evaluated(rng: random.Random, shape: Shape, timeline: Timeline) -> list[GroupPlan]:
    found = []
    episodes = shape.evaluated_tasks * len(SETTINGS)
    for step in sorted({0, *(step for step in range(1, shape.steps + 1) if step % every(shape) == 0)}):
        for setting in SETTINGS:
            for index in range(shape.evaluated_tasks):
                begin = timeline.at(step + 0.92 + rng.uniform(0, 0.3))
                end = min(begin + rng.uniform(0.1, 0.6) * timeline.step_s, timeline.now)
                found.append(GroupPlan("evaluated", begin, end, evaluation=(step, episodes, setting, index)))
    return [plan for plan in found if plan.begin < plan.end]


def every(shape: Shape) -> int:
    """Steps between evaluations."""
    return max(1, shape.steps // shape.evaluations)
