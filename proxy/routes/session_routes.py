"""Groups, sessions, rewards and heartbeats: `/groups`, `/sessions/…`, `/heartbeat`, the admin's `/admin/publish`.

A start that carries an `Idempotency-Key` may be repeated, here or at another replica: it gets the same group, the same
sessions and the same keys, and takes no second place.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from agentrl.configs.evaluation_config import EvalSampling
from agentrl.domain.schemas import Json, SessionStatus
from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.request_bounds import MAX_INT32, Key, Metadata, Name, TaskData
from agentrl.proxy.calls import session_ends
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.tensor_transfer import Transfer, members
from agentrl.proxy.engines.updates import Delivery
from agentrl.proxy.routes import named_sessions
from agentrl.proxy.routes.admission import admitted
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.large_answers import answer
from agentrl.proxy.state import ProxyState
from agentrl.store import heartbeats
from agentrl.store.calls import interactions
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import (
    child_sessions,
    group_starts,
    liveness,
    sealing,
    session_rewards,
    session_view,
    worker_sessions,
)
from agentrl.store.training import rewards

router = APIRouter(tags=["sessions"], route_class=GuardedRoute)
TOGETHER = 8
"""Sessions that are ended together share a commit."""


class Body(BaseModel):
    """Request bodies refuse unknown fields, and values that are read but cannot be written: NaN, half characters.

    A body is JSON whatever its content type says, as the model's routes have it: `curl -d` says it is a form.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        if isinstance(value, bytes):
            value = _parsed(value)
        try:
            orjson.dumps(value)
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot be stored: {error}") from error
        return value


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # pydantic would make a 422 of a ValueError
        raise RequestError(400, "the body is not valid JSON", code="invalid_json") from error


class GroupBody(Body):
    """`task`, `size`, `metadata`, `sampling` and `claim` are for evaluation; training groups get the run's next task.

    Of all workers that start a group under one `claim`, the first gets it, as often as it asks; the others get 409
    `claimed`.
    `owner` names the worker, as NAME/INSTANCE: its heartbeats (`/heartbeat`) keep the sessions alive, and a later
    instance of the name abandons what this one left (`/groups/abandon`).
    """

    is_eval: bool = False
    owner: Name | None = None
    task: TaskData | None = None
    size: int = Field(default=1, ge=1, le=1024)
    metadata: Metadata = Field(default_factory=dict)
    sampling: EvalSampling | None = None
    claim: str | None = Field(default=None, min_length=1, max_length=200)

    @model_validator(mode="after")
    def _a_worker_claims(self) -> GroupBody:
        if self.claim is not None and (self.owner is None or not self.is_eval):
            raise ValueError("claim is of an evaluation that a worker plays: it needs is_eval and owner")
        return self


class OwnerBody(Body):
    """A worker: NAME/INSTANCE, or a name alone for one that is never restarted under it."""

    owner: str = Field(min_length=1, max_length=100)


class SessionBody(Body):
    """An outside program's own session, or with `parent_session_id` a sub-agent's, which has its parent's task."""

    task: TaskData | None = None
    metadata: Metadata = Field(default_factory=dict)
    parent_session_id: Key | None = None


class RewardBody(Body):
    """One reward; without `interaction_id` it is the session's. `scope: branch` keeps it to the path to that call.

    The `Idempotency-Key` of the request stands in for a missing `idempotency_key`.
    """

    value: float
    interaction_id: Key | None = None
    scope: Name | None = None
    name: Name = "reward"
    source: Name = "agent"
    idempotency_key: Key | None = None


class EndBody(Body):
    """How the episode went. Of a long error the beginning is kept."""

    status: SessionStatus = SessionStatus.COMPLETED
    error: str | None = None


class PublishBody(Body):
    """The version to publish; its folder is in the store. A trainer names its epoch: refused when that is over.

    `transfer` says how engines get its tensors otherwise, `digests` what they should have then, by the engine's names,
    `bytes` how many the version has.
    """

    version: int = Field(ge=0, le=MAX_INT32)
    epoch: int | None = Field(default=None, ge=0, le=MAX_INT32)
    transfer: Transfer | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    bytes: int | None = Field(default=None, ge=0)


def _state(request: Request) -> ProxyState:
    state: ProxyState = request.app.state.proxy
    return state


def _opened(base: str, session_id: str, key: str, index: int) -> Json:
    return {
        "session_id": session_id,
        "api_key": key,
        "base_url": f"{base}/sessions/{session_id}/v1",
        "sample_index": index,
    }


@router.post("/groups", status_code=201)
async def start_group(body: GroupBody, request: Request) -> Json:
    """Start the sessions of the run's next task, or of an evaluation task. 429 while admission refuses."""
    state = _state(request)
    authentication.require(await authentication.authenticate(request, state), Power.RUN, Power.ADMIN)
    base = state.public.base(request)
    size = body.size if body.is_eval else state.limits.group_size
    start = (
        await authentication.start_of(request, state)
        if body.claim is None
        else authentication.claim_of(request, state, body.claim)
    )
    sampling = None if body.sampling is None else body.sampling.model_dump(exclude_none=True)
    new_keys = [start.session_key(i) for i in range(size)]
    hashes = [hash_key(key) for key in new_keys]
    if body.is_eval:
        if body.task is None:
            raise RequestError(422, "an evaluation group brings its own task", code="invalid_parameter", param="task")
        group = await state.write(
            group_starts.start_evaluation,
            state.run_id,
            state.limits,
            hashes,
            body.task,
            body.metadata,
            sampling,
            owner=body.owner,
            start_digest=start.digest,
        )
    else:
        group = await admitted(
            state,
            group_starts.start_group,
            hashes,
            outside=body.owner is None,
            owner=body.owner,
            start_digest=start.digest,
        )
    opened = list(zip(group.session_ids, new_keys, strict=True))
    for session_id, key in opened if group.new else ():
        state.opened(session_id, key, is_eval=body.is_eval, sampling=sampling if body.is_eval else None)
    return {
        "group_id": group.group_id,
        "task": {"id": group.task_id, "data": group.task},
        "sessions": [_opened(base, sid, key, i) for i, (sid, key) in enumerate(opened)],
    }


@router.post("/heartbeat")
async def worker_heartbeat(body: OwnerBody, request: Request) -> Json:
    """A worker is alive, and so are the sessions of its groups. Answers how long it may be silent."""
    state = _state(request)
    authentication.require(await authentication.authenticate(request, state), Power.RUN, Power.ADMIN)
    await state.write(heartbeats.beat, state.run_id, "worker", body.owner)
    return {"heartbeat_timeout_s": state.limits.heartbeat_timeout_s}


@router.post("/groups/abandon")
async def abandon_groups(body: OwnerBody, request: Request) -> Json:
    """End the open sessions that other instances of a worker left when they died."""
    state = _state(request)
    authentication.require(await authentication.authenticate(request, state), Power.RUN, Power.ADMIN)
    orphans = await state.read(worker_sessions.left_behind, state.run_id, body.owner)
    for first in range(0, len(orphans), TOGETHER):
        ends = [
            state.write(sealing.end, session_id, SessionStatus.ABANDONED, f"its worker {owner} died", state.limits)
            for session_id, owner in orphans[first : first + TOGETHER]
        ]
        await asyncio.gather(*ends)
    return {"abandoned": len(orphans)}


@router.post("/sessions", status_code=201)
async def start_session(body: SessionBody, request: Request) -> Json:
    """Start one session for a program that brings its own task (429 while admission refuses), or for a sub-agent.

    A sub-agent's session names its parent, in the body or as `x-parent-session-id`; opened with a session key, it is
    that session's. It takes no place of its own.
    """
    state = _state(request)
    caller = await authentication.authenticate(request, state)
    base = state.public.base(request)
    parent_id = body.parent_session_id or request.headers.get(authentication.PARENT_HEADER) or caller.session_id
    start = await authentication.start_of(request, state)
    key = start.session_key(0)
    if parent_id is not None:
        parent_id = await named_sessions.resolve(request, state, parent_id)
        if body.task is not None:
            raise RequestError(
                422,
                "a sub-agent's session has its parent's task: leave `task` out (a session's key opens only such)",
                code="invalid_parameter",
                param="task",
            )
        group = await state.write(child_sessions.start_child, parent_id, state.limits, hash_key(key), body.metadata)
    else:
        group = await admitted(
            state,
            group_starts.start_external,
            [hash_key(key)],
            body.task,
            body.metadata,
            outside=True,
            start_digest=start.digest,
        )
        if group.new:
            state.opened(group.session_ids[0], key, is_eval=False, sampling=None)
    return {
        **_opened(base, group.session_ids[0], key, 0),
        "group_id": group.group_id,
        "parent_session_id": parent_id,
    }


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, request: Request) -> Json:
    """A session's status, calls and rewards."""
    state = _state(request)
    session_id = await named_sessions.resolve(request, state, session_id)
    return await state.read(session_view.of_session, session_id)


@router.post("/sessions/{session_id}/reward")
async def reward(session_id: str, body: RewardBody, request: Request) -> Json:
    """Append a reward. `applied` is false when it came too late: leased, trained or rejected."""
    state = _state(request)
    session_id = await named_sessions.resolve(request, state, session_id)
    answer = await state.write(
        session_rewards.reward,
        session_id,
        state.limits,
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
    """Every reward that the session ever got, oldest first, with who gave it and whether it was applied."""
    state = _state(request)
    session_id = await named_sessions.resolve(request, state, session_id)
    return await state.read(rewards.history, session_id)


@router.post("/sessions/{session_id}/heartbeat")
async def session_heartbeat(session_id: str, request: Request) -> Json:
    """The session is still used, though it makes no call. Answers its status."""
    state = _state(request)
    session_id = await named_sessions.resolve(request, state, session_id)
    return {"status": await state.write(liveness.touch, session_id)}


@router.post("/sessions/{session_id}/end")
async def end(session_id: str, body: EndBody, request: Request) -> Json:
    """Seal the session; its trajectories are built once no call runs any more."""
    if body.status not in (SessionStatus.COMPLETED, SessionStatus.FAILED):
        raise RequestError(422, "status must be completed or failed", code="invalid_parameter", param="status")
    return await _end(session_id, body.status, body.error, request)


@router.delete("/sessions/{session_id}")
async def abandon(session_id: str, request: Request) -> Json:
    """Give the session up; nothing of it is trained."""
    return await _end(session_id, SessionStatus.ABANDONED, None, request)


async def _end(session_id: str, status: SessionStatus, error: str | None, request: Request) -> Json:
    state = _state(request)
    session_id = await named_sessions.resolve(request, state, session_id)
    result = await session_ends.end(state, session_id, status, error)
    calls = await state.read(interactions.of_session, session_id)
    return {"status": result, "interactions": len(calls)}


@router.get("/sessions/{session_id}/trace", response_model=Json)
async def trace(session_id: str, request: Request) -> Response:
    """Every call of the session with messages, token ids, logprobs and version spans."""
    state = _state(request)
    session_id = await named_sessions.resolve(request, state, session_id)
    return await answer(state, session_view.with_trace, session_id)


@router.post("/admin/publish", tags=["admin"])
async def publish_version(body: PublishBody, request: Request) -> Json:
    """Bring every engine to a version and move the run to it."""
    state = _state(request)
    authentication.require(await authentication.authenticate(request, state), Power.ADMIN)
    delivery = Delivery(body.transfer, body.digests, body.bytes)
    return await publishing.publish(state, body.version, body.epoch, delivery)


@router.get("/admin/publish/members", tags=["admin"])
async def publish_members(request: Request) -> list[Json]:
    """The engines that a trainer may send tensors to now, with the number of tensor ranks of each."""
    state = _state(request)
    authentication.require(await authentication.authenticate(request, state), Power.ADMIN)
    return await members([engine.client for engine in state.pool.engines])
