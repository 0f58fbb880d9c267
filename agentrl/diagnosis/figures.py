"""Statistics of a session."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.diagnosis.forks import Fork
from agentrl.diagnosis.record import Call, Session
from agentrl.domain.schemas import ForkReason, InteractionStatus, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Counts of calls and tokens. A share is None when its denominator is 0."""

    calls: int
    delivered: int  # by the policy
    lost: int
    aborted: int
    failed: int
    running: int
    upstream: int  # answered by an upstream model
    trajectories: int
    forks: int
    continuing: int  # calls whose history has a recorded answer, without summaries
    extending: int  # continuing calls that extend an earlier call exactly
    merge_rate: float | None  # extending / continuing
    sampled_tokens: int
    ids: float | None  # share of delivered calls whose sampled tokens all have their ids
    logprobs: float | None  # share of sampled tokens with a logprob
    versions: float | None  # share of sampled tokens with a weight version
    retries: int  # calls that the client's SDK marked as retries
    repeated: int  # calls with the same body as an earlier one
    main: int
    side: int
    subagent: int
    modified: int  # calls sampled from a modified distribution
    greedy: int
    replaced: int  # calls with replaced sampling parameters
    trainable_tokens: int
    untrainable_tokens: int
    reprocessed_tokens: int  # tokens that forks process again


def of(session: Session, forks: Sequence[Fork]) -> Figures:
    """The statistics of a session."""
    delivered = session.delivered
    statuses = Counter(call.status for call in session.calls)
    roles = Counter(call.role for call in session.calls)
    branched = {fork.call.number for fork in forks if fork.costly}
    summaries = {fork.call.number for fork in forks if fork.reason == ForkReason.SUMMARY}
    continuing = [
        call
        for call in delivered
        if call.number not in summaries and (call.parent is not None or call.number in branched)
    ]
    extending = [call for call in continuing if call.number not in branched]
    sampled = sum(call.output_tokens for call in delivered)
    trained = sum(call.output_tokens for call in delivered if why_untrainable(call, session) is None)
    seen: set[tuple[str, int | None]] = set()
    repeated = 0
    for call in session.calls:
        repeated += (call.digest, call.choice) in seen
        seen.add((call.digest, call.choice))
    return Figures(
        calls=len(session.calls),
        delivered=len(delivered),
        lost=statuses[InteractionStatus.LOST],
        aborted=statuses[InteractionStatus.ABORTED],
        failed=statuses[InteractionStatus.FAILED],
        running=statuses[InteractionStatus.RUNNING],
        upstream=roles[Role.UPSTREAM],
        trajectories=len(session.leaves),
        forks=len(forks),
        continuing=len(continuing),
        extending=len(extending),
        merge_rate=_share(len(extending), len(continuing)),
        sampled_tokens=sampled,
        ids=_share(sum(len(call.output_ids) == call.output_tokens for call in delivered), len(delivered)),
        logprobs=_share(sum(math.isfinite(p) for call in delivered for p in call.logprobs), sampled),
        versions=_share(sum(end - start for call in delivered for _, start, end in call.spans), sampled),
        retries=sum(call.retry > 0 for call in session.calls),
        repeated=repeated,
        main=roles[Role.MAIN],
        side=roles[Role.SIDE],
        subagent=roles[Role.SUBAGENT],
        modified=sum(call.modified for call in delivered),
        greedy=sum(call.greedy for call in delivered),
        replaced=sum(bool(call.replaced) for call in delivered),
        trainable_tokens=trained,
        untrainable_tokens=sampled - trained,
        reprocessed_tokens=sum(fork.cost_tokens for fork in forks),
    )


def why_untrainable(call: Call, session: Session) -> str | None:
    """Why a delivered call's tokens are never trained, whatever the session's reward; None when they can be."""
    if call.modified:
        return "sampled from another distribution"
    if call.greedy:
        return "greedy"
    if call.role == Role.SIDE and not any(reward["interaction_id"] == call.id for reward in session.rewards):
        return "side call without a reward of its own"
    return None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
