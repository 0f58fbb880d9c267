"""Why each token of a trajectory is in the loss, or not.

prompt          of the first call's prompt
tool            of tool results that a later call adds
message         of other messages that a later call adds
not sampled     of an assistant's message that a later call adds: the policy did not sample it, or not so
shared          sampled, but another trajectory trains it
distribution    sampled greedily or from an edited distribution, in an evaluation, or with `store: false`
side call       of a call that has no return
left out        by the agent (`trained_tokens`)
stale           sampled by weights that were too old
tied            of a group whose episodes all have the same return
rejected        of a rejected trajectory
trained         in the loss, once its trajectory trains
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, Literal

from sqlalchemy import Connection, select

from agentrl.domain.schemas import TrajectoryState
from agentrl.domain.verdicts import Verdict
from agentrl.store.db import codec
from agentrl.store.exports.step_batches import OfStep
from agentrl.store.tables import interaction_data, interactions, trajectory_interactions
from agentrl.store.training import returns, session_verdicts
from agentrl.store.training.returns import SessionReturns

Reason = Literal[
    "prompt",
    "tool",
    "message",
    "not sampled",
    "shared",
    "distribution",
    "side call",
    "left out",
    "stale",
    "tied",
    "rejected",
    "trained",
]
Spans = list[tuple[Reason, int, int]]
"""(reason, start, end) over the tokens of a trajectory, without gaps."""


def of_trajectories(conn: Connection, part: OfStep) -> dict[str, Spans]:
    """Trajectory → its spans, for the trajectories of one step."""
    turns: dict[str, list[Any]] = {head.id: [] for head in part.heads}
    for row in conn.execute(
        select(
            trajectory_interactions.c.trajectory_id,
            trajectory_interactions.c.owned,
            interactions.c.id,
            interactions.c.trainable,
            interactions.c.output_tokens,
            interaction_data.c.new_messages,
            interaction_data.c.prompt_delta_ids,
            interaction_data.c.spans,
        )
        .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(trajectory_interactions.c.trajectory_id.in_(turns))
        .order_by(trajectory_interactions.c.trajectory_id, trajectory_interactions.c.position)
    ):
        turns[row.trajectory_id].append(row)
    session_ids = sorted({head.session_id for head in part.heads})
    credited = returns.of_sessions(conn, session_ids, part.discount)
    verdicts = session_verdicts.of_sessions(conn, session_ids)
    young = part.ages.keys()
    return {
        head.id: spans(turns[head.id], credited[head.session_id], verdicts[head.session_id], young, otherwise(head))
        for head in part.heads
    }


def otherwise(trajectory: Any) -> Reason:
    """The reason of a token that no other rule concerns."""
    if trajectory.state == TrajectoryState.REJECTED:
        return "rejected"
    if trajectory.state == TrajectoryState.STALE:
        return "tied" if trajectory.reason == "tied" else "stale"
    return "trained"


def spans(turns: Sequence[Any], credited: SessionReturns, verdict: Verdict, young: Set[int], rest: Reason) -> Spans:
    """The spans of one trajectory; `rest` is `otherwise`."""
    found: Spans = []
    for position, turn in enumerate(turns):
        of_turn = [(_of_prompt(turn, position), len(codec.unpack_ids(turn.prompt_delta_ids)))]
        for reason, length in [*of_turn, *_of_output(turn, credited, verdict, young, rest)]:
            start = found[-1][2] if found else 0
            if found and found[-1][0] == reason:
                found[-1] = (reason, found[-1][1], start + length)
            elif length:
                found.append((reason, start, start + length))
    return found


def _of_prompt(turn: Any, position: int) -> Reason:
    if not position:
        return "prompt"
    roles = {message.get("role") for message in codec.unpack_json(turn.new_messages)}
    if "assistant" in roles:
        return "not sampled"
    return "tool" if roles == {"tool"} else "message"


def _of_output(
    turn: Any, credited: SessionReturns, verdict: Verdict, young: Set[int], rest: Reason
) -> Iterator[tuple[Reason, int]]:
    """(reason, length) of consecutive parts of a call's output."""
    if not turn.owned:
        yield "shared", turn.output_tokens
    elif not turn.trainable:
        yield "distribution", turn.output_tokens
    elif turn.id not in credited.calls:
        yield "side call", turn.output_tokens
    else:
        at = 0
        for version, start, end in verdict.within(turn.id, turn.spans):
            yield "left out", start - at
            yield rest if version in young else "stale", end - start
            at = end
        yield "left out", turn.output_tokens - at
