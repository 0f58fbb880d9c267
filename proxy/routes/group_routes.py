"""Groups of sessions for rollout workers: `/groups`, and the workers' heartbeat.

A start that carries an `Idempotency-Key` may be repeated, here or at another replica: it gets the same group, the same
sessions and the same keys, and is admitted once.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from agentrl.configs.evaluation_config import EvalSampling
from agentrl.domain.schemas import Json, SessionStatus
from agentrl.errors import bad_parameter
from agentrl.proxy.access import authentication
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.request_bounds import MAX_INT32, Metadata, Name, TaskData
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.request_bodies import Body
from agentrl.proxy.sessions.admission import admitted
from agentrl.store import heartbeats
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import group_starts, session_lookup
from agentrl.store.sessions.ends import sealing

router = APIRouter(tags=["sessions"], route_class=GuardedRoute)
TOGETHER = 8
"""The number of sessions that are ended together, so that they share a commit."""


class GroupBody(Body):
    """`task`, `size`, `metadata`, `sampling` and `claim` are for evaluation; a training group gets the run's next task.

    Of all workers that start a group under one `claim`, the first one gets it, as often as it repeats the request; the
    others get 409 `claimed`. `owner` names the worker, as NAME/INSTANCE: its heartbeats (`/heartbeat`) keep the
    sessions alive, and a later instance of the name abandons the sessions that this one left (`/groups/abandon`).
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
            raise ValueError("claim is valid only for evaluations of a worker: give is_eval and owner too")
        return self


class OwnerBody(Body):
    """A worker: NAME/INSTANCE, or NAME alone for a worker that never restarts under this name."""

    owner: str = Field(min_length=1, max_length=100)


class About(Body):
    """A worker's description of itself."""

    host: str = Field(default="", max_length=255)
    pid: int = Field(default=0, ge=0, le=MAX_INT32)
    sessions: int = Field(default=0, ge=0, le=MAX_INT32)


class HeartbeatBody(OwnerBody):
    """The heartbeat of a worker."""

    about: About | None = None


@router.post("/groups", status_code=201)
async def start_group(body: GroupBody, request: Request) -> Json:
    """Start the sessions of the run's next task, or of an evaluation task. 429 while admission refuses.

    A session with `is_baseline` is greedy: its return is the baseline of the others (`algorithm.baseline: greedy`), and
    the proxy samples its calls at temperature 0.
    """
    await app_parts.access(request).require(request, Power.RUN, Power.ADMIN)
    store, live = app_parts.store(request), app_parts.context(request).sessions
    base = app_parts.public_address(request).base(request)
    size = body.size if body.is_eval else store.limits.most_sessions
    start = (
        await authentication.start_of(request, store.run_id)
        if body.claim is None
        else authentication.claim_of(request, store.run_id, body.claim)
    )
    sampling = None if body.sampling is None else body.sampling.model_dump(exclude_none=True)
    new_keys = [start.session_key(i) for i in range(size)]
    hashes = [hash_key(key) for key in new_keys]
    if body.is_eval:
        if body.task is None:
            raise bad_parameter("task", "an evaluation group needs a task", 422)
        group = await store.write(
            group_starts.start_evaluation,
            store.run_id,
            store.limits,
            hashes,
            body.task,
            body.metadata,
            sampling,
            owner=body.owner,
            start_digest=start.digest,
        )
    else:
        group = await admitted(
            store,
            group_starts.start_group,
            hashes,
            outside=body.owner is None,
            owner=body.owner,
            start_digest=start.digest,
        )
    opened = list(zip(group.session_ids, new_keys, strict=False))  # an adaptive group may need fewer keys
    baseline = len(opened) - 1 if store.limits.greedy_baseline and not body.is_eval else None
    for i, (session_id, key) in enumerate(opened if group.new else ()):
        own_sampling = sampling if body.is_eval else None
        live.opened(session_id, key, is_eval=body.is_eval, sampling=own_sampling, is_baseline=i == baseline)
    return {
        "group_id": group.group_id,
        "task": {"id": group.task_id, "data": group.task},
        "sessions": [
            opened_json(base, sid, key, i) | {"is_baseline": i == baseline} for i, (sid, key) in enumerate(opened)
        ],
    }


def opened_json(base: str, session_id: str, key: str, index: int) -> Json:
    """The facts that an agent needs to use its new session."""
    return {
        "session_id": session_id,
        "api_key": key,
        "base_url": f"{base}/sessions/{session_id}/v1",
        "sample_index": index,
    }


@router.post("/heartbeat")
async def worker_heartbeat(body: HeartbeatBody, request: Request) -> Json:
    """Keep a worker and the sessions of its groups alive. Answers how long it may be silent."""
    await app_parts.access(request).require(request, Power.RUN, Power.ADMIN)
    store, about = app_parts.store(request), None if body.about is None else body.about.model_dump()
    await store.write(heartbeats.beat, store.run_id, "worker", body.owner, about)
    return {"heartbeat_timeout_s": store.limits.heartbeat_timeout_s}


@router.post("/groups/abandon")
async def abandon_groups(body: OwnerBody, request: Request) -> Json:
    """End the open sessions that other instances of a worker left when they died."""
    await app_parts.access(request).require(request, Power.RUN, Power.ADMIN)
    store = app_parts.store(request)
    orphans = await store.read(session_lookup.left_behind, store.run_id, body.owner)
    for first in range(0, len(orphans), TOGETHER):
        ends = [
            store.write(sealing.end, session_id, SessionStatus.ABANDONED, f"its worker {owner} died", store.limits)
            for session_id, owner in orphans[first : first + TOGETHER]
        ]
        await asyncio.gather(*ends)
    return {"abandoned": len(orphans)}
