"""Rebuilds past batches from the store, compares them with what was trained, and recomputes their credit.

Reads the store only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.presets import PRESETS
from agentrl.configs.proxy_config import MAX_REWARD
from agentrl.domain.credit import SessionRewards
from agentrl.domain.schemas import FACTS, JOINED, Batch, Float32, Json, StepState, TrajectoryTokens
from agentrl.domain.selection import StepRange
from agentrl.errors import UserError, did_you_mean
from agentrl.store import Connection, Database, Row, runs
from agentrl.store.exports.columns import ARRAYS, Columns
from agentrl.store.exports.columns import Row as Record
from agentrl.store.exports.row_pages import tokens_row
from agentrl.store.sessions import rescoring_view
from agentrl.store.training import steps, token_facts
from agentrl.store.training.paths import path_tokens
from agentrl.store.training.returns import Rescore
from agentrl.trainer.algorithms.advantages import token_advantages, turn_advantages
from agentrl.trainer.algorithms.kl import taught_advantages

ESTIMATORS = [name for name in PRESETS if Algorithm(preset=name).estimator == "returns"]
"""The algorithms whose advantages can be computed from the store alone."""

Judge = Callable[[Json], float | Mapping[str, float] | None]
"""`--rescore`: a session (`rescoring_view.describe`) → its reward, `{call id: reward}`, or None to keep its rewards."""

COLUMNS: Columns = {
    "step": "int",
    "trajectory_id": "text",
    "session_id": "text",
    "episode_id": "text",
    "group_id": "text",
    **ARRAYS,
    "turn_advantages": "floats",
    "token_advantages": "floats",
    "return": "float",
    "advantage": "float",
    "old_return": "float",
    "old_advantage": "float",
}
"""The columns of `records`: a trajectory with its new credit and its recorded credit."""


@dataclass(frozen=True, slots=True)
class Check:
    """A step's batch as rebuilt from the store. `fault` describes a difference; None when the batch is identical."""

    step: int
    batch: Batch | None  # None when it cannot be rebuilt
    fault: str | None

    def __str__(self) -> str:
        if self.batch is None:
            return f"step {self.step}: {self.fault}"
        tokens = sum(int(t.loss_mask.sum()) for t in self.batch.trajectories)
        result = self.fault or "identical"
        return f"step {self.step}: {len(self.batch.trajectories)} trajectories, {tokens:,} tokens, {result}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """How to recompute a batch's credit. None keeps the step's own value."""

    judge: Judge | None = None
    discount: float | None = None
    estimator: str | None = None  # a preset whose advantages to compute

    def __post_init__(self) -> None:
        if self.discount is not None and not 0 <= self.discount <= 1:
            raise UserError(f"--discount: {self.discount} is not between 0 and 1")
        if self.estimator is not None and self.estimator not in ESTIMATORS:
            raise UserError(f"--estimator: no estimator {self.estimator!r}{did_you_mean(self.estimator, ESTIMATORS)}")

    @property
    def changes(self) -> bool:
        """Whether any field is set."""
        return self != Credit()


@dataclass(frozen=True, slots=True)
class Change:
    """A trajectory's recorded and recomputed credit. An advantage is the mean over trained tokens; None without any."""

    trajectory_id: str
    old_return: float
    new_return: float
    old_advantage: float | None
    new_advantage: float | None


@dataclass(frozen=True, slots=True)
class Recredited:
    """A batch with recomputed credit: its trajectories with new returns, and the advantages of their turns and tokens.
    Only those of tokens have a teacher's part.
    """

    trajectories: list[TrajectoryTokens]
    advantages: list[Float32]
    of_tokens: list[Float32]
    changes: list[Change]

    def shift(self) -> Shift:
        """Summarize the changes."""
        pairs = [
            (c.old_advantage, c.new_advantage)
            for c in self.changes
            if c.old_advantage is not None and c.new_advantage is not None
        ]
        n = max(1, len(self.changes))
        return Shift(
            old_return=sum(c.old_return for c in self.changes) / n,
            new_return=sum(c.new_return for c in self.changes) / n,
            advantage=sum(abs(new - old) for old, new in pairs) / max(1, len(pairs)),
            flipped=sum(old * new < 0 for old, new in pairs),
            trajectories=len(self.changes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Mean recorded and new returns, mean |new - old| advantage, and the number of advantages that changed sign."""

    old_return: float
    new_return: float
    advantage: float
    flipped: int
    trajectories: int


def chosen_steps(database: Database, run: Row[Any], wanted: StepRange) -> list[Row[Any]]:
    """The completed steps of the surviving lineage in a range. Raises UserError when there are none."""
    complete = [row for row in database.query(steps.of_run, run.id) if row.state != StepState.STARTED]
    chosen = [row for row in complete if row.step in wanted]
    if not complete:
        raise UserError(f"--steps: run {run.name!r} has completed no step yet")
    beyond = wanted.first > complete[-1].step or (wanted.last or 0) > complete[-1].step
    if beyond or not chosen:
        raise UserError(f"--steps: run {run.name!r} has steps {complete[0].step}..{complete[-1].step}, not {wanted}")
    return chosen


def check(database: Database, step: Row[Any]) -> Check:
    """Rebuild a step's batch and compare its digest with the digest of the batch that was trained."""
    try:
        batch = database.query(steps.batch, step.id)
    except path_tokens.DAMAGED as error:
        return Check(step.step, None, f"DIFFERENT: cannot be rebuilt ({type(error).__name__}: {error})")
    if step.batch_digest is None:
        return Check(step.step, batch, "UNKNOWN: it was trained before batches had digests")
    digest = batch.digest() if step.batch_digest.startswith(JOINED) else batch.serial_digest()
    same = digest == step.batch_digest
    return Check(
        step.step, batch, None if same else f"DIFFERENT: its digest is {digest}, {step.batch_digest} was trained"
    )


def recredit(database: Database, step: Row[Any], batch: Batch, credit: Credit) -> Recredited:
    """Recompute the credit of a step's batch, beside its recorded credit.

    Raises UserError for an invalid judge result, and for a step whose advantages need another model.
    """
    judge = credit.judge
    rebatched = (
        database.query(_rebatch, step, credit.discount, judge) if judge or credit.discount is not None else batch
    )
    recorded = database.query(_algorithm, step)
    taught = database.query(_taught, step, batch) if recorded.teaches_tokens else {}
    old = turn_advantages(batch.trajectories, recorded)
    chosen = Algorithm(preset=credit.estimator) if credit.estimator else recorded
    if judge and chosen.normalization == "per_reward":
        raise UserError(
            "--rescore: the advantages (per_reward) compare rewards name by name, and a new score has no name"
        )
    if chosen.needs_greedy and any(t.greedy_return is None for t in rebatched.trajectories):
        raise UserError(f"step {step.step}: {chosen.preset} compares with greedy episodes, which its groups lack")
    new = turn_advantages(rebatched.trajectories, chosen)
    then = [_of_tokens(t, a, recorded, taught) for t, a in zip(batch.trajectories, old, strict=True)]
    now = [_of_tokens(t, a, recorded, taught) for t, a in zip(rebatched.trajectories, new, strict=True)]
    changes = [
        Change(before.trajectory_id, before.episode_return, after.episode_return, _mean(before, a), _mean(after, b))
        for before, after, a, b in zip(batch.trajectories, rebatched.trajectories, then, now, strict=True)
    ]
    return Recredited(rebatched.trajectories, new, now, changes)


def records(step: Row[Any], credited: Recredited) -> list[Record]:
    """Rows for a file with the columns `COLUMNS`."""
    return [
        tokens_row(tokens)
        | {
            "step": step.step,
            "turn_advantages": advantages,
            "token_advantages": of_tokens,
            "advantage": change.new_advantage,
            "old_return": change.old_return,
            "old_advantage": change.old_advantage,
        }
        for tokens, advantages, of_tokens, change in zip(
            credited.trajectories, credited.advantages, credited.of_tokens, credited.changes, strict=True
        )
    ]


def _algorithm(conn: Connection, step: Row[Any]) -> Algorithm:
    """The algorithm of a step: from the run's configuration, else from the step's estimator.

    Raises UserError when its advantages need the outputs of another model.
    """
    configured = runs.get(conn, step.run_id).config.get("trainer", {}).get("algorithm")
    algorithm = Algorithm.model_validate(configured or step.estimator)
    models = {
        "critic": algorithm.needs_critic,
        "reference policy": algorithm.needs_reference and algorithm.kl == "reward",
    }
    for model in (name for name, needed in models.items() if needed):
        raise UserError(f"step {step.step} was trained with a {model}, whose outputs are not in the store")
    if algorithm.advantage is not None:
        raise UserError(f"step {step.step} was trained with the advantages of {algorithm.advantage}, not of a preset")
    return algorithm


def _rebatch(conn: Connection, step: Row[Any], discount: float | None, judge: Judge | None) -> Batch:
    rescore = _rescorer(conn, step.run_id, judge) if judge else None
    return steps.batch(conn, step.id, discount=discount, rescore=rescore)


def _rescorer(conn: Connection, run_id: str, judge: Judge) -> Rescore:
    most = float(runs.get(conn, run_id).config.get("proxy", {}).get("max_reward", MAX_REWARD))

    def rescore(session_id: str, recorded: SessionRewards) -> SessionRewards:
        session = rescoring_view.describe(conn, session_id)
        verdict = judge(session)
        if verdict is None:
            return recorded
        if isinstance(verdict, Mapping):
            ids = [call["id"] for call in session["calls"]]
            for call_id in verdict:
                if call_id not in ids:
                    raise UserError(f"--rescore: session {session_id} has no call {call_id!r}")
            return SessionRewards(calls={key: _number(value, most) for key, value in verdict.items()})
        return SessionRewards(session=_number(verdict, most))

    return rescore


def _number(value: Any, most: float) -> float:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not -most <= value <= most:
        raise UserError(
            f"--rescore: it must return a finite number of at most ±{most:g} (proxy.max_reward), {{call id: number}} "
            f"or None, not {value!r}"
        )
    return float(value)


def _taught(conn: Connection, step: Row[Any], batch: Batch) -> dict[str, tuple[Float32, Float32]]:
    """Trajectory → (T,) logprobs of the policy before the step, and of its teacher: NaN where it has none.

    Raises UserError when they were not recorded.
    """
    trained = [t for t in batch.trajectories if t.loss_mask.any()]
    facts = token_facts.of_trajectories(conn, {t.trajectory_id: step.id for t in trained})
    found: dict[str, tuple[Float32, Float32]] = {}
    for t in trained:
        rows = facts[t.trajectory_id].trained if t.trajectory_id in facts else None
        if rows is None or np.isnan(rows[FACTS.index("logprob_before")]).any():
            raise UserError(
                f"step {step.step} was trained with a teacher, whose outputs for trajectory {t.trajectory_id} are not "
                "in the store: the facts of its tokens were left out (trainer.token_facts), removed, or are of an "
                "earlier release"
            )
        both = np.zeros((2, t.length), np.float32)
        both[:, t.loss_mask] = rows[[FACTS.index("logprob_before"), FACTS.index("teacher_logprob")]]
        found[t.trajectory_id] = both[0], both[1]
    return found


def _of_tokens(
    t: TrajectoryTokens, turns: Float32, algorithm: Algorithm, taught: Mapping[str, tuple[Float32, Float32]]
) -> Float32:
    """(T,) the advantages of tokens as the trainer makes them of those of turns, the teacher's part included."""
    advantages = token_advantages(t, turns)
    if algorithm.reward_weight != 1:
        advantages = np.float32(algorithm.reward_weight) * advantages
    if t.trajectory_id not in taught:
        return advantages
    return taught_advantages(advantages, *taught[t.trajectory_id], algorithm)


def _mean(tokens: TrajectoryTokens, advantages: Float32) -> float | None:
    trained = advantages[tokens.loss_mask]
    return float(trained.mean()) if len(trained) else None
