"""Sessions: start, reward, keep alive, end, trace. `/sessions/…`

A start that carries an `Idempotency-Key` may be repeated, here or at another replica: it gets the same session and the
same key, and is admitted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from agentrl.domain import session_stats
from agentrl.domain.schemas import Json, SessionStatus
from agentrl.domain.verdicts import EVERYTHING, Verdict
from agentrl.errors import bad_parameter
from agentrl.proxy.access import authentication
from agentrl.proxy.access.request_bounds import GroupName, Key, Metadata, Name, TaskData, TokenRange, bounded_ranges
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.group_routes import opened_json
from agentrl.proxy.routes.large_answers import answer
from agentrl.proxy.routes.request_bodies import Body
from agentrl.proxy.sessions.admission import admitted
from agentrl.store import events
from agentrl.store.calls import call_traces
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import child_sessions, group_starts, named_groups, session_view
from agentrl.store.sessions.ends import liveness, session_rewards
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.training import rewards

LONGEST_ANSWER = 65_536
"""Characters of an answer that a request may have; of more than `answer_text.LONGEST`, a digest is stored."""

router = APIRouter(tags=["sessions"], route_class=GuardedRoute)


class SessionBody(Body):
    """A session of an outside program or, with `parent_session_id`, of a sub-agent, which has its parent's task.

    All sessions that are started with the same `group` form one group of `group_size` sessions (default:
    `rollout.group_size`) with the same task. Without `group` a session is a group of one.
    """

    task: TaskData | None = None
    metadata: Metadata = Field(default_factory=dict)
    parent_session_id: Key | None = None
    group: GroupName | None = None
    group_size: int | None = Field(default=None, ge=1, le=1024)


class RewardBody(Body):
    """One reward: of a call or, without `interaction_id`, of the session. `scope: branch` limits it to the call's path.

    Without `idempotency_key`, the request's `Idempotency-Key` header is used.
    """

    value: float
    interaction_id: Key | None = None
    scope: Name | None = None
    name: Name = "reward"
    source: Name = "agent"
    idempotency_key: Key | None = None


class EndBody(Body):
    """How the episode ended. A long error is truncated.

    `reject` is the reason why nothing of the session is trained, `reject_group` that of its whole group; the group's
    last session to end may carry it. `trained_tokens` limits training to ranges of some
    calls' output tokens: `{"interaction_id": [[start, end], …]}`, ascending and disjoint. `answer` is what the episode
    answered, for the vote of an evaluation's samples. `stats` are numbers that the agent measured, by name; their means
    are metrics of the step. `truncated` says that a limit ended the episode, for example one of its turns.
    """

    status: SessionStatus = SessionStatus.COMPLETED
    error: str | None = None
    reject: Name | None = None
    reject_group: Name | None = None
    answer: Annotated[str, Field(max_length=LONGEST_ANSWER)] | None = None
    trained_tokens: Annotated[dict[Key, list[TokenRange]], AfterValidator(bounded_ranges)] | None = None
    stats: Annotated[dict[str, float], AfterValidator(session_stats.checked)] = Field(default_factory=dict)
    truncated: bool = False


@router.post("/sessions", status_code=201)
async def start_session(body: SessionBody, request: Request) -> Json:
    """Start a session for a program with its own task (429 while admission refuses), or for a sub-agent.

    The first start of a `group` is admitted with all places of the group; the others join it without admission. 409
    `group_full` when all are taken, `group_closed` after the missing ones were given up, `group_differs` for another
    `task` or `group_size` than the first start's.

    A sub-agent's parent is named in the body or as `x-parent-session-id`; with a session key, it is the key's session.
    A sub-agent's session needs no admission.
    """
    store = app_parts.store(request)
    caller = await app_parts.access(request).authenticate(request)
    base = app_parts.public_address(request).base(request)
    parent_id = body.parent_session_id or request.headers.get(authentication.PARENT_HEADER) or caller.session_id
    start = await authentication.start_of(request, store.run_id)
    key = start.session_key(0)
    if parent_id is not None:
        parent_id = await app_parts.finder(request).resolve(request, parent_id)
        if body.task is not None:
            raise bad_parameter(
                "task",
                "a sub-agent's session has its parent's task: leave out `task` (a session key opens only sub-agents)",
                422,
            )
        if body.group is not None or body.group_size is not None:
            param = "group" if body.group is not None else "group_size"
            raise bad_parameter(param, f"a sub-agent's session is of its parent's group: leave out `{param}`", 422)
        group = await store.write(child_sessions.start_child, parent_id, store.limits, hash_key(key), body.metadata)
    elif body.group is not None:
        size = _group_size(body, store.limits)
        group = await admitted(
            store,
            named_groups.start_in_group,
            hash_key(key),
            body.group,
            size,
            body.task,
            body.metadata,
            outside=True,
        )
    else:
        if body.group_size is not None:
            raise bad_parameter("group_size", "group_size needs `group`, the name of the group", 422)
        group = await admitted(
            store,
            group_starts.start_external,
            [hash_key(key)],
            body.task,
            body.metadata,
            outside=True,
            start_digest=start.digest,
        )
    if group.new and parent_id is None:
        app_parts.context(request).sessions.opened(group.session_ids[0], key, is_eval=False, sampling=None)
    return {
        **opened_json(base, group.session_ids[0], key, group.first_index),
        "group_id": group.group_id,
        "parent_session_id": parent_id,
    }


def _group_size(body: SessionBody, limits: Limits) -> int:
    """The size of a named group. Raises RequestError 422 for one that could never be trained."""
    size = limits.group_size if body.group_size is None else body.group_size
    if size < limits.min_group_size:
        message = (
            f"group_size {size} is never trained: a group needs at least {limits.min_group_size} sessions "
            "(rollout.min_group_size)"
        )
        raise bad_parameter("group_size", message, 422)
    return size


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, request: Request) -> Json:
    """A session's status, calls and rewards."""
    session_id = await app_parts.finder(request).resolve(request, session_id)
    return await app_parts.store(request).read(session_view.of_session, session_id)


@router.post("/sessions/{session_id}/reward")
async def reward(session_id: str, body: RewardBody, request: Request) -> Json:
    """Append a reward. `applied` is false if it came too late: the trajectory is leased, trained or rejected."""
    store = app_parts.store(request)
    session_id = await app_parts.finder(request).resolve(request, session_id)
    answer = await store.write(
        session_rewards.reward,
        session_id,
        store.limits,
        value=body.value,
        interaction_id=body.interaction_id,
        scope=body.scope,
        name=body.name,
        source=body.source,
        idempotency_key=body.idempotency_key or authentication.repeat_key(request),
    )
    return {"reward_id": answer.reward_id, "applied": answer.applied}


@router.get("/sessions/{session_id}/rewards")
async def reward_history(session_id: str, request: Request) -> list[Json]:
    """All rewards of the session, oldest first, with their source and whether they were applied."""
    session_id = await app_parts.finder(request).resolve(request, session_id)
    return await app_parts.store(request).read(rewards.history, session_id)


@router.get("/sessions/{session_id}/refusals")
async def refusals(session_id: str, request: Request) -> list[Json]:
    """Calls of the session that were refused before they began, oldest first: status, code, param, message, route."""
    store = app_parts.store(request)
    session_id = await app_parts.finder(request).resolve(request, session_id)
    return await store.write(events.refusals, store.run_id, session_id)  # a write: it comes after those still queued


@router.post("/sessions/{session_id}/heartbeat")
async def session_heartbeat(session_id: str, request: Request) -> Json:
    """Keep a session alive that makes no call. Answers its status."""
    session_id = await app_parts.finder(request).resolve(request, session_id)
    return {"status": await app_parts.store(request).write(liveness.touch, session_id)}


@router.post("/sessions/{session_id}/end")
async def end(session_id: str, body: EndBody, request: Request) -> Json:
    """Seal the session. Its trajectories are built once its last call has ended."""
    if body.status not in (SessionStatus.COMPLETED, SessionStatus.FAILED):
        raise bad_parameter("status", "status must be completed or failed", 422)
    verdict = Verdict(rejected=body.reject, ranges=body.trained_tokens, truncated=body.truncated)
    return await _end(
        session_id,
        body.status,
        body.error,
        request,
        verdict,
        body.reject_group,
        given=body.answer,
        stats=body.stats,
    )


@router.delete("/sessions/{session_id}")
async def abandon(session_id: str, request: Request) -> Json:
    """Abandon the session: it is never trained."""
    return await _end(session_id, SessionStatus.ABANDONED, None, request)


async def _end(
    session_id: str,
    status: SessionStatus,
    error: str | None,
    request: Request,
    verdict: Verdict = EVERYTHING,
    reject_group: str | None = None,
    *,
    given: str | None = None,
    stats: Mapping[str, float] | None = None,
) -> Json:
    session_id = await app_parts.finder(request).resolve(request, session_id)
    result = await app_parts.ends(request).end(
        session_id, status, error, verdict, reject_group, answer=given, stats=stats
    )
    calls = await app_parts.store(request).read(call_traces.of_session, session_id)
    return {"status": result, "interactions": len(calls)}


@router.get("/sessions/{session_id}/trace", response_model=Json)
async def trace(session_id: str, request: Request) -> Response:
    """Every call of the session with messages, token ids, logprobs and version spans."""
    session_id = await app_parts.finder(request).resolve(request, session_id)
    return await answer(app_parts.store(request), session_view.with_trace, session_id)
