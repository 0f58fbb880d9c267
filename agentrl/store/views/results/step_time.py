"""Where a step's time goes: its parts one after another, and which of them bounds the run.

    wait for a batch │ read, build, forward, backward, update, other │ write the version │ checkpoint │ wait for engines
    agents           │ trainer                                       │ publish           │ checkpoint │ publish

The parts are those of rank 0's thread, so they add up to the time from one step to the next. What goes on beside them
(agents that sample, a checkpoint that is written, an upload) costs the trainer nothing and is no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.domain.schemas import Json

AGENTS, TRAINER, PUBLISH, CHECKPOINT = "agents", "trainer", "publish", "checkpoint"
PARTS: dict[str, tuple[str, str]] = {
    "wait_for_batch": ("wait for a batch", AGENTS),
    "read": ("read", TRAINER),
    "build": ("build", TRAINER),
    "forward": ("forward", TRAINER),
    "backward": ("backward", TRAINER),
    "update": ("update", TRAINER),
    "other": ("other", TRAINER),
    "train": ("train", TRAINER),
    "write_version": ("write the version", PUBLISH),
    "checkpoint": ("checkpoint", CHECKPOINT),
    "wait_for_policy": ("wait for the engines", PUBLISH),
}
"""Part → what people read, and the stage that it belongs to; in the order of a step."""
OF_TRAIN = ("read", "build", "forward", "backward", "update", "other")
"""Parts of `time/train`, where the trainer has measured them."""
RECENT = 10
"""Steps whose mean says what bounds the run."""
ADVICE = {
    AGENTS: "The agents bound the run: the trainer waits for batches in {share:.0%} of a step's time; more engines "
    "(resources.engines) or more episodes at once (rollout.max_concurrent_groups) give batches sooner, and a larger "
    "trainer.max_staleness lets agents go further ahead.",
    TRAINER: "The trainer bounds the run: its update takes {share:.0%} of a step's time; more ranks "
    "(resources.trainer.ranks) or larger microbatches (trainer.tokens_per_microbatch) make it shorter.",
    PUBLISH: "Publishing bounds the run: writing versions and waiting for engines takes {share:.0%} of a step's time; "
    "versions that engines fetch while they serve (publish.prepare), deltas (publish.delta) and more engines at a time "
    "(publish.parallel) make it shorter.",
    CHECKPOINT: "Checkpoints bound the run: steps wait for them in {share:.0%} of their time; "
    "trainer.checkpoint_every: auto writes them beside the next steps.",
}
"""Stage → what a person reads when it takes the most time: the settings to change."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The stage that takes the most of the steps' time, its share of it, and what a person reads."""

    stage: str
    share: float
    text: str


def parts(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The measured parts of a step in seconds, in order. Without parts of its update, `train` stands for them."""
    seconds = {name: value for name in PARTS if (value := metrics.get(f"time/{name}")) is not None}
    if any(name in seconds for name in OF_TRAIN):
        seconds.pop("train", None)
    if "checkpoint" in seconds:  # it is measured with the version that is written beside it
        seconds["checkpoint"] = max(0.0, seconds["checkpoint"] - seconds.get("write_version", 0.0))
    return seconds


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean seconds of each part over steps (of `parts`), in order; a step without a part counts as 0 s of it."""
    return {name: fmean(step.get(name, 0.0) for step in steps) for name in PARTS if any(name in step for step in steps)}


def bound(steps: Sequence[Mapping[str, float]]) -> Bound | None:
    """What bounds the run, from the parts of its newest steps; None where nothing is measured."""
    found = means(steps[-RECENT:])
    total = sum(found.values())
    if total <= 0:
        return None
    by_stage = dict.fromkeys((AGENTS, TRAINER, PUBLISH, CHECKPOINT), 0.0)
    for name, seconds in found.items():
        by_stage[PARTS[name][1]] += seconds
    stage = max(by_stage, key=lambda one: by_stage[one])
    share = by_stage[stage] / total
    return Bound(stage, share, ADVICE[stage].format(share=share))


def stalls(facts: Json) -> list[float]:
    """How long each engine stood still in a publish, in seconds, from the facts of its event; none if not recorded."""
    found = facts.get("stall_s")
    values = list(found.values()) if isinstance(found, dict) else [found]
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
