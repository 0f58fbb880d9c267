"""Audit of groups, one at a time: sessions, calls and their exact tokens, rewards, trajectories, what was trained."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select
from zstandard import ZstdError

from agentrl.domain import credit
from agentrl.domain.credit import CallFact, SessionRewards
from agentrl.domain.schemas import GONE, InteractionStatus, Role, SessionStatus, StepState, TrajectoryState
from agentrl.store.audit.lineage_audit import TRAINED, Lineage
from agentrl.store.db import codec
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    rewards,
    sessions,
    step_trajectories,
    trajectories,
    trajectory_interactions,
)

CLOCK_SLACK_S = 5.0
"""By how much the clocks of two machines may differ."""
LOGPROB_SLACK = 1e-3
"""A certain token's logprob may round to a little above 0."""
_STATES = {  # of a training group → of its trajectories, and of the step that leased it
    "running": ({"ready", "rejected"}, ()),
    "ready": ({"ready", "rejected"}, ()),
    "leased": ({"leased", "stale", "rejected"}, (StepState.STARTED,)),
    "trained": ({"trained", "stale", "rejected"}, TRAINED),
    "stale": ({"stale", "rejected"}, ()),
    "rejected": ({"rejected"}, ()),
}
_RETURN = list(trajectories.c.keys()).index("return")  # a keyword, so no attribute of the row


@dataclass(slots=True)
class GroupRows:
    """A group with every row that hangs on it."""

    group: Row[Any]
    sessions: dict[str, Row[Any]] = field(default_factory=dict)
    calls: dict[str, Row[Any]] = field(default_factory=dict)  # with their arrays; finished ones first, in order
    rewards: list[Row[Any]] = field(default_factory=list)  # oldest first
    trajectories: dict[str, Row[Any]] = field(default_factory=dict)
    paths: dict[str, list[Row[Any]]] = field(default_factory=dict)  # trajectory → its calls, in order
    trained: dict[str, list[Row[Any]]] = field(default_factory=dict)  # trajectory → what steps did with it

    def calls_of(self, session_id: str) -> list[Row[Any]]:
        """The calls of a session."""
        return [call for call in self.calls.values() if call.session_id == session_id]


@dataclass(slots=True)
class StepTotals:
    """What the rows of a step's batch add up to."""

    groups: int = 0
    trajectories: int = 0
    tokens_trained: int = 0
    wasted_tokens: int = 0
    staleness_max: int | None = None
    returns: float = 0.0
    episodes: int = 0


@dataclass(frozen=True, slots=True)
class _Credit:
    calls: dict[str, float]
    episode: float
    rewarded: bool


def load(conn: Connection, run_id: str, first: str, last: str) -> list[GroupRows]:
    """The groups of a run from one id to another, with all their rows."""
    here = (groups.c.run_id == run_id, groups.c.id.between(first, last))
    found = {row.id: GroupRows(row) for row in conn.execute(select(groups).where(*here).order_by(groups.c.id))}
    of_session: dict[str, GroupRows] = {}
    of_trajectory: dict[str, GroupRows] = {}
    for row in conn.execute(
        select(sessions).join(groups, groups.c.id == sessions.c.group_id).where(*here).order_by(sessions.c.id)
    ):
        found[row.group_id].sessions[row.id] = row
        of_session[row.id] = found[row.group_id]
    data = interaction_data.c
    for row in conn.execute(
        select(interactions, data.prompt_delta_ids, data.output_ids, data.logprobs, data.spans)
        .join(sessions, sessions.c.id == interactions.c.session_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .outerjoin(interaction_data, data.interaction_id == interactions.c.id)
        .where(*here)
        .order_by(interactions.c.session_id, interactions.c.seq.is_(None), interactions.c.seq, interactions.c.id)
    ):
        of_session[row.session_id].calls[row.id] = row
    for row in conn.execute(
        select(rewards)
        .join(sessions, sessions.c.id == rewards.c.session_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(*here)
        .order_by(rewards.c.id)
    ):
        of_session[row.session_id].rewards.append(row)
    of_group = trajectories.join(groups, groups.c.id == trajectories.c.group_id)
    for row in conn.execute(select(trajectories).select_from(of_group).where(*here).order_by(trajectories.c.id)):
        found[row.group_id].trajectories[row.id] = row
        of_trajectory[row.id] = found[row.group_id]
    path, trained = trajectory_interactions.c, step_trajectories.c
    for row in conn.execute(
        select(trajectory_interactions)
        .select_from(of_group.join(trajectory_interactions, path.trajectory_id == trajectories.c.id))
        .where(*here)
        .order_by(path.trajectory_id, path.position)
    ):
        of_trajectory[row.trajectory_id].paths.setdefault(row.trajectory_id, []).append(row)
    for row in conn.execute(
        select(step_trajectories)
        .select_from(of_group.join(step_trajectories, trained.trajectory_id == trajectories.c.id))
        .where(*here)
        .order_by(trained.trajectory_id, trained.step_id)
    ):
        of_trajectory[row.trajectory_id].trained.setdefault(row.trajectory_id, []).append(row)
    return list(found.values())


def check(rows: GroupRows, lineage: Lineage, totals: dict[str, StepTotals]) -> Iterator[str]:
    """Everything that is wrong with a group; adds what its step trained to `totals`."""
    yield from _group(rows, lineage)
    for session in rows.sessions.values():
        yield from _session(rows, session)
    for call in rows.calls.values():
        yield from _call(rows, call, lineage)
    yield from _tokens(rows)
    yield from _rewards(rows, lineage)
    yield from _paths(rows)
    yield from _trajectories(rows, lineage, totals)


def _step_of(rows: GroupRows, lineage: Lineage) -> Row[Any] | None:
    ids = {t.lease_step_id for t in rows.trajectories.values() if t.lease_step_id is not None}
    return lineage.steps.get(min(ids)) if ids else None


def _group(rows: GroupRows, lineage: Lineage) -> Iterator[str]:
    group, name = rows.group, f"groups {rows.group.id}"
    unbuilt = sum(not session.built for session in rows.sessions.values())
    if (group.state == "running") != (unbuilt > 0):
        yield f"{name}: it is {group.state} with {unbuilt} sessions that are not built"
    if (group.state == "running") != (group.finished_at is None):
        yield f"{name}: it is {group.state}, finished at {group.finished_at}"
    roots = sorted(s.sample_index for s in rows.sessions.values() if s.parent_session_id is None)
    if roots != list(range(group.size)):
        yield f"{name}: its size is {group.size}, its sessions are numbered {roots}"
    if group.cursor is not None and group.cursor >= lineage.run.data_cursor:
        yield f"{name}: its cursor {group.cursor} was never given out"
    if group.is_eval:
        if group.state not in ("running", "evaluated"):
            yield f"{name}: an evaluation is {group.state}"
        if rows.trajectories:
            yield f"{name}: an evaluation has trajectories"
        return
    if group.state not in _STATES:
        yield f"{name}: it is {group.state}, but no evaluation"
        return
    allowed, of_step = _STATES[group.state]
    states = Counter(t.state for t in rows.trajectories.values())
    for trajectory in rows.trajectories.values():
        if trajectory.state not in allowed:
            yield f"trajectories {trajectory.id}: it is {trajectory.state} in a group that is {group.state}"
    if group.state in ("ready", "leased", "trained", "stale") and not states[group.state]:
        yield f"{name}: it is {group.state}, but none of its trajectories is"
    leased_by = {t.lease_step_id for t in rows.trajectories.values() if t.lease_step_id is not None}
    if len(leased_by) != bool(of_step):
        yield f"{name}: it is {group.state}, leased by {len(leased_by)} steps"
    for step_id in sorted(leased_by):
        step = lineage.steps.get(step_id)
        if step is None or step.state not in of_step:
            yield f"{name}: it is {group.state}, but step {step_id} is {step.state if step else 'of another run'}"


def _session(rows: GroupRows, session: Row[Any]) -> Iterator[str]:
    name, parent = f"sessions {session.id}", rows.sessions.get(session.parent_session_id)
    if (session.run_id, session.is_eval) != (rows.group.run_id, rows.group.is_eval):
        yield f"{name}: run or kind differ from its group's"
    if (session.status == SessionStatus.OPEN) != (session.ended_at is None):
        yield f"{name}: it is {session.status}, ended at {session.ended_at}"
    if session.built and session.status in (SessionStatus.OPEN, SessionStatus.CLOSING):
        yield f"{name}: it is built, but {session.status}"
    if session.parent_session_id is not None:
        if parent is None or parent.id == session.id:
            yield f"{name}: its parent {session.parent_session_id} is not of its group"
        elif session.built and not parent.built:
            yield f"{name}: it is built before its parent {parent.id}"
        elif session.status == SessionStatus.OPEN and parent.status != SessionStatus.OPEN:
            yield f"{name}: it is open, but its parent {parent.id} has ended"
        elif (session.root_session_id, session.depth) != (parent.root_session_id or parent.id, parent.depth + 1):
            yield f"{name}: its root or its depth does not follow from its parent {parent.id}"
    elif (session.root_session_id, session.depth) != (None, 0):
        yield f"{name}: it has no parent, but the root {session.root_session_id} at depth {session.depth}"
    seqs = [call.seq for call in rows.calls_of(session.id) if call.seq is not None]
    if seqs != list(range(1, session.seq + 1)):
        yield f"{name}: its seq is {session.seq}, its calls have {seqs}"
    has_paths = any(t.session_id == session.id for t in rows.trajectories.values())
    if has_paths and not (session.built and session.status == SessionStatus.COMPLETED):
        yield f"{name}: it has trajectories, but is {session.status}{'' if session.built else ' and not built'}"


def _call(rows: GroupRows, call: Row[Any], lineage: Lineage) -> Iterator[str]:
    name, parent = f"interactions {call.id}", rows.calls.get(call.parent_id)
    recorded = call.status in (InteractionStatus.COMPLETE, InteractionStatus.ABORTED) and call.seq is not None
    if call.run_id != rows.group.run_id:
        yield f"{name}: it is of another run than its session"
    if call.status == InteractionStatus.COMPLETE and call.seq is None:
        yield f"{name}: it is complete without a seq"
    if recorded != (call.output_ids is not None):
        yield f"{name}: it is {call.status} and holds {'no ' if call.output_ids is None else ''}tokens"
    if not recorded and call.seq is not None:
        yield f"{name}: it is {call.status} with seq {call.seq}"
    if (call.status == InteractionStatus.RUNNING) != (call.finished_at is None):
        yield f"{name}: it is {call.status}, finished at {call.finished_at}"
    if call.bridged != (call.parent_id is not None):
        yield f"{name}: bridged is {call.bridged} but its parent is {call.parent_id}"
    if call.parent_id is not None:
        if parent is None or parent.session_id != call.session_id:
            yield f"{name}: its parent {call.parent_id} is not of its session"
        elif parent.status != InteractionStatus.COMPLETE or (call.seq is not None and not parent.seq < call.seq):
            yield f"{name}: its parent {call.parent_id} was not delivered before it"
    if call.trainable and (rows.group.is_eval or call.temperature <= 0 or call.role == Role.UPSTREAM):
        yield f"{name}: it is trainable, but greedy, of an evaluation, or not the policy's"
    if call.output_ids is None:
        return
    try:
        output, logprobs = codec.unpack_ids(call.output_ids), codec.unpack_logprobs(call.logprobs)
    except (ZstdError, ValueError):
        yield f"{name}: its tokens or logprobs cannot be decoded"
        return
    if not len(output) == call.output_tokens == len(logprobs):
        yield f"{name}: output ids, logprobs and count disagree"
    if not (np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)).all():
        yield f"{name}: a logprob is not finite, or above 0"
    borders = [0, *(end for _, _, end in call.spans)]
    if (
        borders[-1] != len(output)
        or [start for _, start, _ in call.spans] != borders[:-1]
        or (borders != sorted(set(borders)))
    ):
        yield f"{name}: version spans {call.spans} do not cover {len(output)} tokens"
    versions = [version for version, _, _ in call.spans]
    if (call.min_version, call.max_version) != (min(versions, default=None), max(versions, default=None)):
        yield f"{name}: versions {call.min_version} to {call.max_version} are not those of its spans {call.spans}"
    for version in sorted(set(versions)):
        known = lineage.versions.get(version)
        if known is None:
            yield f"{name}: version {version} sampled it, which does not exist"
        elif call.finished_at is not None and known.created_at > call.finished_at + CLOCK_SLACK_S:
            yield f"{name}: version {version} sampled it before it was made"


def _tokens(rows: GroupRows) -> Iterator[str]:
    """What the engine got for each call is its parent's tokens and its own delta, byte for byte."""
    ends: dict[str, tuple[Any, int]] = {}  # call → digest state and length of its whole sequence
    for call in rows.calls.values():
        if call.output_ids is None:
            continue
        digest, length = ends.get(call.parent_id or "", (hashlib.blake2b(digest_size=16), 0))
        digest = digest.copy()
        try:
            delta, output = codec.unpack_ids(call.prompt_delta_ids), codec.unpack_ids(call.output_ids)
        except (ZstdError, ValueError):
            yield f"interactions {call.id}: its prompt or output cannot be decoded"
            continue
        digest.update(delta.astype("<i4").tobytes())
        if (digest.hexdigest(), length + len(delta)) != (call.prompt_digest, call.prompt_tokens):
            yield f"interactions {call.id}: the engine got another prompt than its parent's tokens and its own delta"
        digest.update(output.astype("<i4").tobytes())
        ends[call.id] = (digest, length + len(delta) + len(output))


def _rewards(rows: GroupRows, lineage: Lineage) -> Iterator[str]:
    step = _step_of(rows, lineage)
    newest: dict[tuple[Any, ...], float] = {}
    for reward in rows.rewards:
        name, call = f"rewards {reward.id}", rows.calls.get(reward.interaction_id)
        if reward.run_id != rows.group.run_id:
            yield f"{name}: it is of another run than its session"
        if (reward.scope == "session") != (reward.interaction_id is None):
            yield f"{name}: scope {reward.scope} does not fit call {reward.interaction_id}"
        if reward.interaction_id is not None and (call is None or call.session_id != reward.session_id):
            yield f"{name}: its call {reward.interaction_id} is not of its session"
        if not math.isfinite(reward.value):
            yield f"{name}: its value is {reward.value}"
        if rows.group.is_eval and not reward.applied:
            yield f"{name}: it is not applied to an evaluation"
        if reward.applied and step is not None and reward.created_at > step.started_at + CLOCK_SLACK_S:
            yield f"{name}: it is applied, though it came after step {step.id} had leased the group"
        if (
            rows.group.finished_at is not None
            and rows.group.state == "rejected"
            and reward.applied
            and (reward.created_at > rows.group.finished_at + CLOCK_SLACK_S)
        ):
            yield f"{name}: it is applied, though it came after the group was rejected"
        fact = (reward.session_id, reward.interaction_id, reward.scope, reward.name)
        if reward.created_at < newest.get(fact, -math.inf) - CLOCK_SLACK_S:
            yield f"{name}: it supersedes a reward that came after it"
        newest[fact] = reward.created_at


def _paths(rows: GroupRows) -> Iterator[str]:
    """The trajectories of a session are its root-to-leaf paths, and each output is owned by one of them."""
    owners: Counter[str] = Counter()
    covered: set[str] = set()
    for trajectory in rows.trajectories.values():
        path, above = rows.paths.get(trajectory.id, []), None
        fault = None if path and [row.position for row in path] == list(range(len(path))) else "is not dense"
        for row in path:
            call = rows.calls.get(row.interaction_id)
            if call is None or call.session_id != trajectory.session_id or call.parent_id != above:
                fault = "does not follow its calls' parents"
            elif call.status != InteractionStatus.COMPLETE:
                fault = f"has call {call.id}, which is {call.status}"
            elif call.role == Role.UPSTREAM:
                fault = f"has call {call.id}, which the policy did not answer"
            owners[row.interaction_id] += row.owned
            covered.add(row.interaction_id)
            above = row.interaction_id
        if fault is None and trajectory.leaf_id != above:
            fault = f"ends at {above}, not at its leaf {trajectory.leaf_id}"
        if (
            fault is None
            and trajectory.tokens != rows.calls[above or ""].prompt_tokens + rows.calls[above or ""].output_tokens
        ):
            fault = f"has other than {trajectory.tokens} tokens"
        if fault is not None:
            yield f"trajectories {trajectory.id}: its path {fault}"
    inner = {call.parent_id for call in rows.calls.values() if call.status == InteractionStatus.COMPLETE}
    leaves = Counter(trajectory.leaf_id for trajectory in rows.trajectories.values())
    for call in rows.calls.values():
        session = rows.sessions[call.session_id]
        trains = session.built and not session.is_eval and session.status == SessionStatus.COMPLETED
        trains = trains and not any(parent.status in GONE for parent in _above(rows, session))
        if not (trains and call.status == InteractionStatus.COMPLETE and call.role != Role.UPSTREAM):
            continue
        if call.id not in covered:
            yield f"interactions {call.id}: it is complete, its session is built, and it is in no trajectory"
        elif owners[call.id] != 1:
            yield f"interactions {call.id}: {owners[call.id]} trajectories own its output"
        elif leaves[call.id] != (call.id not in inner):
            yield f"interactions {call.id}: it is the leaf of {leaves[call.id]} trajectories"


def _above(rows: GroupRows, session: Row[Any]) -> list[Row[Any]]:
    """The sessions above a sub-agent's, nearest first."""
    above: list[Row[Any]] = []
    parent = rows.sessions.get(session.parent_session_id)
    while parent is not None and len(above) < len(rows.sessions):  # in broken rows it may be a loop
        above.append(parent)
        parent = rows.sessions.get(parent.parent_session_id)
    return above


def _trajectories(rows: GroupRows, lineage: Lineage, totals: dict[str, StepTotals]) -> Iterator[str]:
    step = _step_of(rows, lineage)
    if step is not None:
        totals.setdefault(step.id, StepTotals()).groups += 1
    credits_ = {discount: _credit(rows, discount) for discount in lineage.discounts}
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
        trained = [c for c in owned if c.trainable and c.output_tokens and c.id in credited.calls]
        yield from _worth(name, t, trained, credited, [one.episode for one in by_discount])
        if (t.lease_step_id is None) != (t.lease_epoch is None):
            yield f"{name}: it has half a lease: step {t.lease_step_id}, epoch {t.lease_epoch}"
        elif t.state in ("leased", "trained") and t.lease_step_id is None:
            yield f"{name}: it is {t.state} without a lease"
        elif t.state in ("ready", "rejected") and t.lease_step_id is not None:
            yield f"{name}: it is {t.state}, but leased by step {t.lease_step_id}"
        surviving = [
            row
            for row in rows.trained.get(t.id, [])
            if row.step_id not in lineage.steps or lineage.steps[row.step_id].state != StepState.ROLLED_BACK
        ]
        if len(surviving) != (t.state == TrajectoryState.TRAINED) or any(
            row.step_id != t.lease_step_id for row in surviving
        ):
            yield f"{name}: it is {t.state} and was trained by {len(surviving)} surviving steps"
        for row in rows.trained.get(t.id, []):
            by = lineage.steps.get(row.step_id)
            if by is not None and by.batch_digest is not None and row.staleness_max > by.max_staleness:
                yield (
                    f"step_trajectories {row.step_id} {t.id}: trained at staleness {row.staleness_max}, above the "
                    f"bound {by.max_staleness}"
                )
        if step is not None and t.lease_step_id == step.id:
            yield from _batch(name, t, trained, surviving, step, lineage, totals[step.id])
            episode = [rows.sessions[t.session_id], *_above(rows, rows.sessions[t.session_id])][-1].id
            if episode not in counted:
                counted.add(episode)
                totals[step.id].episodes += 1
                totals[step.id].returns += t[_RETURN] or 0.0


def _worth(
    name: str, t: Row[Any], trained: Sequence[Row[Any]], credited: _Credit, episodes: Sequence[float]
) -> Iterator[str]:
    """Return, tokens, versions and reason follow from the rewards that are applied."""
    value = t[_RETURN]
    if value is None or not any(math.isclose(value, one, rel_tol=1e-9, abs_tol=1e-9) for one in episodes):
        yield f"{name}: its return is {value}, but its rewards give {episodes[0]}"
    if t.trainable_tokens != sum(call.output_tokens for call in trained):
        yield f"{name}: its trainable_tokens are {t.trainable_tokens}, not those of its calls"
    versions = (
        min((call.min_version for call in trained), default=None),
        max((call.max_version for call in trained), default=None),
    )
    if (t.min_version, t.max_version) != versions:
        yield f"{name}: its versions are {t.min_version} to {t.max_version}, its calls' {versions[0]} to {versions[1]}"
    untrainable = "no_trainable_tokens" if not trained else "no_reward" if not credited.rewarded else None
    reasons = {
        TrajectoryState.STALE: ("too_old", "tied") if t.lease_step_id is None else ("too_old",),
        TrajectoryState.REJECTED: (untrainable or "group_too_small",),
    }.get(TrajectoryState(t.state), (None,))
    if t.reason not in reasons or (untrainable is not None and t.state != TrajectoryState.REJECTED):
        yield f"{name}: it is {t.state} ({t.reason}), but its calls and rewards say {untrainable or 'trainable'}"


def _batch(
    name: str,
    t: Row[Any],
    trained: Sequence[Row[Any]],
    rows: Sequence[Row[Any]],
    step: Row[Any],
    lineage: Lineage,
    totals: StepTotals,
) -> Iterator[str]:
    """Staleness by the spans and the surviving chain, whatever the trainer said; adds to the step's totals."""
    if t.lease_epoch is not None and t.lease_epoch > step.epoch:
        yield f"{name}: its lease is of epoch {t.lease_epoch}, its step of {step.epoch}"
    young: list[tuple[int, int]] = []  # (age, tokens)
    old = 0
    for call in trained:
        for version, start, end in call.spans or ():
            age = lineage.age(version, step)
            if age is None or age > step.max_staleness:
                old += end - start
            else:
                young.append((age, end - start))
    tokens = sum(n for _, n in young)
    totals.wasted_tokens += old if t.state != TrajectoryState.STALE else old + tokens
    if step.batch_digest is None and step.state != StepState.STARTED:
        return  # of a time when steps did not record their bound
    if t.state == TrajectoryState.STALE:
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


def _credit(rows: GroupRows, discount: float) -> dict[str, _Credit]:
    """Credit of every session, from the applied rewards alone; sub-agents inherit from the session above."""
    facts: dict[str, list[tuple[str | None, str, str, float]]] = {sid: [] for sid in rows.sessions}
    calls: dict[str, list[CallFact]] = {sid: [] for sid in rows.sessions}
    for reward in rows.rewards:
        if reward.applied:
            facts[reward.session_id].append((reward.interaction_id, reward.scope, reward.name, reward.value))
    for call in rows.calls.values():
        if call.status == InteractionStatus.COMPLETE:
            parent = rows.calls.get(call.parent_id)
            earlier = parent is not None and (parent.seq or 0) < (call.seq or 0)  # in broken rows it may be a loop
            fact = CallFact(call.id, call.parent_id if earlier else None, call.role)
            calls[call.session_id].append(fact)
    done: dict[str, _Credit] = {}
    for session_id in _from_the_top(rows):
        own = credit.counting(facts[session_id])
        above = done.get(rows.sessions[session_id].parent_session_id or "")
        rewarded = own.any or (above is not None and above.rewarded)
        if above is not None and above.rewarded and not own.any:
            own = SessionRewards(session=above.episode)
        by_call = credit.call_returns(calls[session_id], own, discount)
        episode = above.episode if above is not None else credit.outcome(calls[session_id], by_call)
        done[session_id] = _Credit(by_call, episode, rewarded)
    return done


def _from_the_top(rows: GroupRows) -> list[str]:
    """The sessions of a group, parents before their children; last those that broken rows put into a loop."""
    below: dict[str, list[str]] = {}
    order: list[str] = []
    for row in rows.sessions.values():
        if row.parent_session_id in rows.sessions:
            below.setdefault(row.parent_session_id, []).append(row.id)
        else:
            order.append(row.id)
    for session_id in order:
        order += below.get(session_id, [])
    return order + sorted(rows.sessions.keys() - order)
