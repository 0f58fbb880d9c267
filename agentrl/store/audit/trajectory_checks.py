"""Audit of trajectories: return, versions, lease, staleness, and what a step trained of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from agentrl.domain.schemas import TRAINED, StepState, TrajectoryState
from agentrl.domain.verdicts import Verdict
from agentrl.store.audit.group_rows import GroupRows, sessions_above, step_of
from agentrl.store.audit.lineage_audit import Lineage
from agentrl.store.audit.reward_checks import Credit, credit_of_sessions
from agentrl.store.tables import trajectories
from agentrl.store.training import session_verdicts
from agentrl.store.training.trajectories import BASELINE, rejected

_RETURN = list(trajectories.c.keys()).index("return")  # a keyword cannot be an attribute of the row


@dataclass(slots=True)
class StepTotals:
    """Totals of the rows of a step's batch."""

    groups: int = 0
    trajectories: int = 0
    tokens_trained: int = 0
    wasted_tokens: int = 0
    staleness_max: int | None = None
    returns: float = 0.0
    episodes: int = 0


def check_trajectories(rows: GroupRows, lineage: Lineage, totals: dict[str, StepTotals]) -> Iterator[str]:
    step = step_of(rows, lineage)
    if step is not None:
        totals.setdefault(step.id, StepTotals()).groups += 1
    for replaying in {row.step_id for of in rows.replays.values() for row in of if _survives(row, lineage)}:
        totals.setdefault(replaying, StepTotals()).groups += 1
    credits_ = {discount: credit_of_sessions(rows, discount) for discount in lineage.discounts}
    counted: set[str] = set()
    for t in rows.trajectories.values():
        name = f"trajectories {t.id}"
        if t.run_id != rows.group.run_id or t.session_id not in rows.sessions:
            yield f"{name}: its run or session is not its group's"
            continue
        by_discount = [of_session[t.session_id] for of_session in credits_.values()]
        credited = by_discount[0]
        owned = [
            rows.calls[row.interaction_id]
            for row in rows.paths.get(t.id, [])
            if row.owned and row.interaction_id in rows.calls
        ]
        verdict = _verdict(rows, t.session_id)
        trained = [c for c in owned if c.trainable and verdict.count(c.id, c.output_tokens) and c.id in credited.calls]
        yield from _credit_and_state(
            name,
            t,
            trained,
            verdict,
            credited,
            [one.episode for one in by_discount],
            rows.group.reject_reason,
            is_baseline=rows.sessions[t.session_id].is_baseline,
        )
        if (t.lease_step_id is None) != (t.lease_epoch is None):
            yield f"{name}: it has half a lease: step {t.lease_step_id}, epoch {t.lease_epoch}"
        elif t.state in ("leased", "trained") and t.lease_step_id is None:
            yield f"{name}: it is {t.state} without a lease"
        elif t.state in ("ready", "rejected") and t.lease_step_id is not None:
            yield f"{name}: it is {t.state}, but leased by step {t.lease_step_id}"
        surviving = [row for row in rows.trained.get(t.id, []) if _survives(row, lineage)]
        again = {row.step_id: row for row in rows.replays.get(t.id, []) if _survives(row, lineage)}
        by_lease = [row for row in surviving if row.step_id == t.lease_step_id]
        by_replay = {row.step_id for row in surviving} - {t.lease_step_id}
        if len(by_lease) != (t.state == TrajectoryState.TRAINED) or not by_replay <= again.keys():
            allowed = f", {len(again)} of them once more" if again else ""
            yield f"{name}: it is {t.state} and was trained by {len(surviving)} surviving steps{allowed}"
        yield from _replays(name, t, again, by_replay, lineage)
        for row in rows.trained.get(t.id, []):
            by = lineage.steps.get(row.step_id)
            if by is not None and by.batch_digest is not None and row.staleness_max > by.max_staleness:
                yield (
                    f"step_trajectories {row.step_id} {t.id}: trained at staleness {row.staleness_max}, above the "
                    f"bound {by.max_staleness}"
                )
        if step is not None and t.lease_step_id == step.id:
            stale = t.state == TrajectoryState.STALE
            others = [row for row in surviving if row.step_id not in again]
            yield from _batch(name, t, stale, trained, verdict, others, step, lineage, totals[step.id])
            episode = [rows.sessions[t.session_id], *sessions_above(rows, rows.sessions[t.session_id])][-1].id
            if episode not in counted:
                counted.add(episode)
                totals[step.id].episodes += 1
                totals[step.id].returns += t[_RETURN] or 0.0
        for step_id, row in again.items():
            if (by := lineage.steps.get(step_id)) is not None:
                mine = [one for one in surviving if one.step_id == step_id]
                yield from _batch(name, t, row.stale, trained, verdict, mine, by, lineage, totals[step_id])


def _survives(row: Row[Any], lineage: Lineage) -> bool:
    """Whether the step of a row was not rolled back."""
    return row.step_id not in lineage.steps or bool(lineage.steps[row.step_id].state != StepState.ROLLED_BACK)


def _replays(
    name: str, t: Row[Any], again: Mapping[str, Row[Any]], trained_by: Set[str], lineage: Lineage
) -> Iterator[str]:
    """A replay follows the step of the lease, is trained unless it is too old, and is one of so many as configured."""
    if not again:
        return
    first = lineage.steps.get(t.lease_step_id)
    if t.state not in (TrajectoryState.TRAINED, TrajectoryState.STALE) or first is None:
        yield f"{name}: it is {t.state}, but {len(again)} steps train it once more"
        return
    for step_id, row in again.items():
        step = lineage.steps.get(step_id)
        if step is None or step.step <= first.step:
            yield f"replays {step_id} {t.id}: step {first.step} trains it first, which is no earlier one"
        elif step.state in TRAINED and row.stale == (step_id in trained_by):
            yield f"replays {step_id} {t.id}: it is {'stale' if row.stale else 'young'}, but its step says otherwise"
    most = ((lineage.run.config.get("rollout") or {}).get("replay") or {}).get("times", 0)
    if len(again) > most:
        yield f"{name}: {len(again)} steps train it once more, rollout.replay allows {most}"


def _verdict(rows: GroupRows, session_id: str) -> Verdict:
    """Which tokens of a session train; a session below a rejected root is rejected too."""
    session = rows.sessions[session_id]
    root = [session, *sessions_above(rows, session)][-1]
    return session_verdicts.below(Verdict.of(root.verdict), Verdict.of(session.verdict))


def _credit_and_state(
    name: str,
    t: Row[Any],
    trained: Sequence[Row[Any]],
    verdict: Verdict,
    credited: Credit,
    episodes: Sequence[float],
    reject_group: str | None,
    *,
    is_baseline: bool,
) -> Iterator[str]:
    """Return, tokens, versions and reason follow from the rewards that are applied, and from the verdict."""
    value = t[_RETURN]
    if value is None or not any(math.isclose(value, one, rel_tol=1e-9, abs_tol=1e-9) for one in episodes):
        yield f"{name}: its return is {value}, but its rewards give {episodes[0]}"
    if t.trainable_tokens != sum(verdict.count(call.id, call.output_tokens) for call in trained):
        yield f"{name}: its trainable_tokens are {t.trainable_tokens}, not those of its calls"
    found = {version for call in trained for version in verdict.versions(call.id, call.spans or ())}
    versions = min(found, default=None), max(found, default=None)
    if (t.min_version, t.max_version) != versions:
        yield f"{name}: its versions are {t.min_version} to {t.max_version}, its calls' {versions[0]} to {versions[1]}"
    untrainable = None
    if is_baseline:
        untrainable = BASELINE
    elif not trained:
        untrainable = "no_trainable_tokens"
    elif verdict.rejected is not None:
        untrainable = rejected(verdict.rejected)
    elif not credited.rewarded:
        untrainable = "no_reward"
    of_group = "group_too_small" if reject_group is None else rejected(reject_group)
    reasons = {
        TrajectoryState.STALE: ("too_old", "tied") if t.lease_step_id is None else ("too_old",),
        TrajectoryState.REJECTED: (untrainable or of_group,),
    }.get(TrajectoryState(t.state), (None,))
    if t.reason not in reasons or (untrainable is not None and t.state != TrajectoryState.REJECTED):
        yield f"{name}: it is {t.state} ({t.reason}), but its calls and rewards say {untrainable or 'trainable'}"


def _batch(
    name: str,
    t: Row[Any],
    stale: bool,
    trained: Sequence[Row[Any]],
    verdict: Verdict,
    rows: Sequence[Row[Any]],
    step: Row[Any],
    lineage: Lineage,
    totals: StepTotals,
) -> Iterator[str]:
    """Check staleness from spans and the surviving chain, not from the trainer's records; adds to the step's totals."""
    if t.lease_epoch is not None and t.lease_epoch > step.epoch:
        yield f"{name}: its lease is of epoch {t.lease_epoch}, its step of {step.epoch}"
    young: list[tuple[int, int]] = []  # (age, tokens)
    old = 0
    for call in trained:
        for version, start, end in verdict.within(call.id, call.spans or ()):
            age = lineage.age(version, step)
            if age is None or age > step.max_staleness:
                old += end - start
            else:
                young.append((age, end - start))
    tokens = sum(n for _, n in young)
    totals.wasted_tokens += old + tokens if stale else old
    if step.batch_digest is None and step.state != StepState.STARTED:
        return  # written before steps recorded their bound
    if stale:
        if not old:
            yield f"{name}: it is stale, but step {step.id} finds every token young enough"
        return
    totals.trajectories += 1
    if not tokens:
        yield f"{name}: step {step.id} leased it, but finds none of its tokens young enough"
    for row in rows:
        facts = (max((age for age, _ in young), default=0), tokens)
        mean = sum(age * n for age, n in young) / max(1, tokens)
        if (row.staleness_max, row.tokens_trained) != facts or not math.isclose(
            row.staleness_mean, mean, rel_tol=1e-4, abs_tol=1e-4
        ):
            yield (
                f"step_trajectories {row.step_id} {t.id}: {row.tokens_trained} tokens at staleness {row.staleness_max} "
                f"({row.staleness_mean:g}), but its spans say {tokens} at {facts[0]} ({mean:g})"
            )
        totals.tokens_trained += row.tokens_trained
        totals.staleness_max = max(row.staleness_max, totals.staleness_max or 0)
