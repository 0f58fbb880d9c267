"""AReaL's front door: its agents, clients and gateways run against this proxy as they are.

    POST /grant_capacity        what admission would take now; our own admission decides, nothing is granted
    POST /rl/start_session      a session of an outside program, or a group, and its key, which may be used again
    POST /chat/completions, …   the model, under AReaL's paths as well: they have no /v1
    POST /rl/set_reward         a reward, durable, of a call
    POST /rl/end_session
    POST /export_trajectories   what was sampled, with returns, as tensors or as lists

Shapes and statuses are AReaL's; everything behind them is `session_routes.py`'s. Its errors carry `detail` beside ours.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, model_validator
from sqlalchemy import Connection
from starlette.responses import JSONResponse, Response

from agentrl.domain.schemas import PROMPT_VERSION, Json, SessionStatus
from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.request_bounds import LONGEST_KEY, Key
from agentrl.proxy.calls import session_ends
from agentrl.proxy.dialects import DIALECTS
from agentrl.proxy.metrics import counters
from agentrl.proxy.routes import model_routes
from agentrl.proxy.routes.admission import admitted
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.large_answers import answer
from agentrl.proxy.routes.session_routes import Body
from agentrl.proxy.state import ProxyState
from agentrl.store.db.codec import hash_key
from agentrl.store.sessions import areal_sessions, group_admission, session_lookup
from agentrl.store.sessions.areal_sessions import Path

router = APIRouter(tags=["areal"], route_class=GuardedRoute)
PATHS = frozenset({"/grant_capacity", "/rl/start_session", "/rl/set_reward", "/rl/end_session", "/export_trajectories"})
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 1.0
ONLY_TRAJECTORY = 0
"""AReaL's inference service numbers what lies between rewards; here a session is one trajectory."""
NO_REWARD = "it was exported without a reward"
TORCH_NAMES = {"int32": "torch.int32", "float32": "torch.float32", "bool": "torch.bool"}


class ArealBody(Body):
    """AReaL's routes ignore fields that they do not know."""

    model_config = ConfigDict(extra="ignore")


class StartBody(ArealBody):
    """AReaL's task, and a key to use again: one that this route gave out or that the caller made.

    Keys that other routes gave out stay with their sessions. `group_size` asks as AReaL's inference service is asked:
    so many sessions of one task, in one group.
    """

    task_id: Key
    api_key: Annotated[str, Field(max_length=LONGEST_KEY, pattern=r"^[!-~]*$")] | None = None
    group_size: Annotated[int, Field(ge=0, le=1024)] | None = None


class RewardBody(ArealBody):
    """Without `interaction_id` (a response's id) the reward is the last call's."""

    interaction_id: Key | None = None
    reward: float


class ExportBody(ArealBody):
    """`session_id`, or as the inference service has it `session_ids`, merged, which `remove_session` ends.

    `encoding: list` gives plain numbers; `tensor` what AReaL's clients decode.
    """

    session_id: Key | None = None
    session_ids: Annotated[list[Key], Field(min_length=1, max_length=1024)] | None = None
    trajectory_id: int | None = None
    remove_session: bool = True
    discount: float = Field(default=1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"
    encoding: Literal["tensor", "list"] = "tensor"

    @model_validator(mode="after")
    def _names_sessions(self) -> Self:
        if (self.session_id is None) == (self.session_ids is None):
            raise ValueError("name session_id, or session_ids")
        return self


def with_detail(body: bytes) -> bytes:
    """An error of ours with AReaL's `detail` beside it."""
    error = orjson.loads(body)
    return orjson.dumps({"detail": error["error"]["message"], **error})


@router.post("/grant_capacity")
async def grant_capacity(request: Request) -> Json:
    """How many sessions admission would take now. It grants nothing: no permit can outrun the bound on staleness."""
    state = await _of_runner(request)
    return {"capacity": await state.read(group_admission.free_slots, state.run_id, state.limits)}


@router.post("/rl/start_session")
async def start_session(body: StartBody, request: Request) -> JSONResponse:
    """Start a session, or with `group_size` a group of them (201). 429 while admission refuses.

    An `api_key` that opens a session has that one ended first, and then opens the new one.
    """
    state = await _of_runner(request)
    begun = await authentication.start_of(request, state)
    new_keys = [begun.session_key(i, authentication.REUSABLE) for i in range(max(1, body.group_size or 1))]
    if body.api_key:
        _check_choice(state, body.api_key)
        new_keys[0] = body.api_key
        before = await state.read(areal_sessions.active, state.run_id, hash_key(body.api_key), begun.digest)
        if before is not None:
            await session_ends.end(state, before)
    hashes = [hash_key(key) for key in new_keys]
    group = await admitted(state, areal_sessions.start, hashes, body.task_id, outside=True, start_digest=begun.digest)
    opened = list(zip(group.session_ids, new_keys, strict=True))
    if body.group_size is None:
        return JSONResponse({"session_id": opened[0][0], "api_key": opened[0][1]})
    listed = [{"session_id": session_id, "session_api_key": key} for session_id, key in opened]
    return JSONResponse({"group_id": group.group_id, "sessions": listed}, status_code=201)


def _check_choice(state: ProxyState, key: str) -> None:
    """Raises RequestError 400 for a key that opens something else."""
    theirs = authentication.opens_more(state, key)
    if theirs or key.startswith(authentication.FIXED):
        raise RequestError(400, "this key cannot be a session's", code="invalid_api_key", param="api_key")


@router.post("/rl/set_reward")
async def set_reward(body: RewardBody, request: Request) -> Json:
    """Append a reward; `applied` is false when it came too late. 400 for a call that was not delivered."""
    state: ProxyState = request.app.state.proxy
    session_id = await model_routes.session_of(request, state)
    try:
        answer = await state.write(
            areal_sessions.reward,
            session_id,
            state.limits,
            value=body.reward,
            interaction_id=body.interaction_id,
            idempotency_key=authentication.repeat_key(request),
        )
    except RequestError as refused:
        if refused.code in ("interaction_not_found", "interaction_incomplete"):  # AReaL's clients expect 400
            raise RequestError(400, str(refused), code=refused.code, param=refused.param) from refused
        raise
    return {
        "message": "success",
        "applied": answer.applied,
        "interaction_count": answer.interactions,
        "session_id": session_id,
        "trajectory_id": ONLY_TRAJECTORY,
        "trajectory_ready": True,
        "ready_transition": answer.first,
    }


@router.post("/rl/end_session")
async def end_session(request: Request) -> Json:
    """Seal the session. Ending twice is harmless."""
    state: ProxyState = request.app.state.proxy
    session_id = await model_routes.session_of(request, state)
    await session_ends.end(state, session_id)
    return {"message": "success", "interaction_count": len(await state.read(areal_sessions.delivered, session_id))}


@router.post("/export_trajectories", response_model=Json)
async def export_trajectories(body: ExportBody, request: Request) -> Response:
    """The calls of an ended session with tokens and returns; it stays, and can be exported again.

    Waits for the end of `session_id`; 409 while it is open after `proxy.request_timeout_s`. Of `session_ids`, those
    that are unknown or without a reward are left out. `individual`: every call, its prompt and its output. `concat`:
    every leaf with all that led to it; what several share is trained in the first.
    """
    state = await _of_runner(request)
    if body.session_id is not None:
        status = await _ended(request, state, body.session_id)
        return await answer(state, _export_json, body, [body.session_id], status=status)
    ready = [
        session_id
        for session_id in body.session_ids or ()
        if body.trajectory_id in (None, ONLY_TRAJECTORY) and await _is_ready(request, state, body, session_id)
    ]
    return await answer(state, _export_json, body, ready)


def _export_json(conn: Connection, body: ExportBody, session_ids: Sequence[str], **more: str) -> Json:
    merged: Json = {}
    for session_id in session_ids:
        merged |= _exported(conn, body, session_id)
    return {"interactions": merged, **more}


def _exported(conn: Connection, body: ExportBody, session_id: str) -> Json:
    each_call = body.style == "individual"
    found = areal_sessions.paths(conn, session_id, body.discount, each_call=each_call)
    encode = _tensor if body.encoding == "tensor" else _lists
    exported = {path.response_ids[-1]: _individual(path) if each_call else _concat(path) for path in found}
    for item in exported.values():
        item["tensor_dict"] = {name: encode(array) for name, array in item["tensor_dict"].items()}
    return exported


async def _is_ready(request: Request, state: ProxyState, body: ExportBody, session_id: str) -> bool:
    """Whether a session of a group has a reward. With `remove_session` it ends here: given up, if it has none."""
    row = await state.read(session_lookup.get, session_id)
    if row is None or row.run_id != state.run_id:
        return False
    rewarded = await state.read(areal_sessions.is_rewarded, session_id)
    if body.remove_session:
        status = SessionStatus.COMPLETED if rewarded else SessionStatus.ABANDONED
        await session_ends.end(state, session_id, status, None if rewarded else NO_REWARD)
        await _ended(request, state, session_id)
    return rewarded


async def _ended(request: Request, state: ProxyState, session_id: str) -> str:
    """The status of a session that takes no call any more, once it has. Raises RequestError 404, 409, 499."""
    await authentication.session_caller(request, state, session_id)
    deadline, pause_s = time.monotonic() + state.request_timeout_s, FIRST_POLL_S
    while True:
        row = await state.read(session_lookup.get, session_id)
        assert row is not None, "sessions are never deleted"
        if row.status not in (SessionStatus.OPEN, SessionStatus.CLOSING):
            return str(row.status)
        if time.monotonic() > deadline:
            raise RequestError(409, f"session {session_id} has not ended", code="session_open")
        if await request.is_disconnected():
            raise RequestError(499, "the client went away", code="client_closed_request")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _individual(path: Path) -> Json:
    t = path.tokens
    of_call = t.turn_ids == len(path.response_ids) - 1
    value = path.returns[-1]
    return {
        "interaction_id": path.response_ids[-1],
        "reward": value,
        "tensor_dict": _arrays(
            t.input_ids,
            t.loss_mask,
            np.where(of_call, t.logprobs, 0.0),
            np.where(of_call, t.versions, PROMPT_VERSION),
            value or 0.0,
        ),
    }


def _concat(path: Path) -> Json:
    """The return is the episode's, as baselines see it; each turn's own is beside it."""
    t = path.tokens
    return {
        "interaction_id": path.response_ids[-1],
        "reward": t.episode_return,
        "interaction_ids": path.response_ids,
        "turn_returns": path.returns,
        "tensor_dict": _arrays(t.input_ids, t.loss_mask, t.logprobs, t.versions, t.episode_return),
    }


def _arrays(
    ids: npt.NDArray[Any], mask: npt.NDArray[Any], logprobs: npt.NDArray[Any], versions: npt.NDArray[Any], value: float
) -> dict[str, npt.NDArray[Any]]:
    """AReaL's tensors of one sample: (1, T), and `rewards` (1,)."""
    rows = {
        "input_ids": ids.astype(np.int32),
        "loss_mask": mask.astype(np.int32),
        "logprobs": logprobs.astype(np.float32),
        "versions": versions.astype(np.int32),
        "attention_mask": np.ones(len(ids), np.bool_),
    }
    return {name: row[np.newaxis] for name, row in rows.items()} | {"rewards": np.array([value], np.float32)}


def _tensor(array: npt.NDArray[Any]) -> Json:
    """A tensor as AReaL's remote calls write it."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"type": "tensor", "data": data, "shape": list(array.shape), "dtype": TORCH_NAMES[array.dtype.name]}


def _lists(array: npt.NDArray[Any]) -> Any:
    return array.tolist()


async def _of_runner(request: Request) -> ProxyState:
    """The state, for a run or admin key: what AReaL's admin key may. Raises RequestError 401, 403."""
    state: ProxyState = request.app.state.proxy
    authentication.require(await authentication.authenticate(request, state), Power.RUN, Power.ADMIN)
    return state


def _without_version(path: str, handle: Callable[[Request], Awaitable[Response]]) -> None:
    """Serve a model route under AReaL's path too; behind it the request reads as one to /v1."""

    async def endpoint(request: Request) -> Response:
        return await handle(
            Request(
                {**request.scope, "path": path, "raw_path": path.encode(), model_routes.AREALS: True}, request.receive
            )
        )

    router.add_route(path.removeprefix("/v1"), endpoint, ["POST"], include_in_schema=False)


for _path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    _without_version(_path, counters.counted(DIALECTS[_path], model_routes.endpoint(DIALECTS[_path])))
