"""AReaL's front door: its agents, clients and gateways run against this proxy as they are.

    POST /grant_capacity        what admission would take now; our own admission decides, nothing is granted
    POST /rl/start_session      a session of an outside program, and its key, which may be one that was used before
    POST /chat/completions, …   the model, under AReaL's paths as well: they have no /v1
    POST /rl/set_reward         a reward, durable, of a call or of the session
    POST /rl/end_session
    POST /export_trajectories   what was sampled, with returns, as tensors or as lists

Shapes and statuses are AReaL's; everything behind them is `lifecycle.py`'s. Its errors carry `detail` beside ours.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from agentrl.errors import RequestError
from agentrl.proxy import keys, metrics, model_api
from agentrl.proxy.admission import admitted
from agentrl.proxy.dialects import DIALECTS
from agentrl.proxy.guarded import GuardedRoute
from agentrl.proxy.keys import Power
from agentrl.proxy.lifecycle import Body
from agentrl.proxy.state import ProxyState
from agentrl.schemas import PROMPT_VERSION, InteractionStatus, Json, Role, SessionStatus
from agentrl.store import areal, interactions, sessions
from agentrl.store.areal import Path
from agentrl.store.codec import hash_key

router = APIRouter(tags=["areal"], route_class=GuardedRoute)
PATHS = frozenset({"/grant_capacity", "/rl/start_session", "/rl/set_reward", "/rl/end_session", "/export_trajectories"})
POLL_S = 0.1
SHORTEST_KEY = 20
TORCH_NAMES = {"int32": "torch.int32", "float32": "torch.float32", "bool": "torch.bool"}


class StartBody(Body):
    """AReaL's task, and a key to use again: one that this route gave out or that the caller made.

    Keys that other routes gave out stay with their sessions.
    """

    task_id: str = Field(max_length=200)
    api_key: Annotated[str, Field(min_length=SHORTEST_KEY, max_length=200, pattern=r"^[!-~]+$")] | None = None


class RewardBody(Body):
    """Without `interaction_id` (a response's id) the reward is the session's."""

    interaction_id: str | None = None
    reward: float


class ExportBody(Body):
    """`encoding: list` gives plain numbers; `tensor` what AReaL's clients decode."""

    session_id: str
    discount: float = Field(default=1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"
    encoding: Literal["tensor", "list"] = "tensor"


def with_detail(body: bytes) -> bytes:
    """An error of ours with AReaL's `detail` beside it."""
    error = orjson.loads(body)
    return orjson.dumps({"detail": error["error"]["message"], **error})


@router.post("/grant_capacity")
async def grant_capacity(request: Request) -> Json:
    """How many sessions admission would take now. It grants nothing: no permit can outrun the bound on staleness."""
    state = await _of_runner(request)
    return {"capacity": await state.read(sessions.room, state.run_id, state.limits)}


@router.post("/rl/start_session")
async def start_session(body: StartBody, request: Request) -> Json:
    """Start a session. 429 while admission refuses, 409 while the session of `api_key` is open."""
    state = await _of_runner(request)
    begun = await keys.start_of(request, state)
    key = body.api_key or begun.session_key(0, keys.REUSABLE)
    if body.api_key is not None:
        _check_choice(state, body.api_key)
    session_id = await admitted(
        state, areal.start, hash_key(key), body.task_id, outside=True, start_digest=begun.digest
    )
    return {"session_id": session_id, "api_key": key}


def _check_choice(state: ProxyState, key: str) -> None:
    """Raises RequestError 400 for a key that opens something else."""
    theirs = keys.opens_more(state, key)
    if theirs or key.startswith(keys.FIXED):
        raise RequestError(400, "this key cannot be a session's", code="invalid_api_key", param="api_key")


@router.post("/rl/set_reward")
async def set_reward(body: RewardBody, request: Request) -> Json:
    """Append a reward; `applied` is false when it came too late. 400 for a call that was not delivered."""
    state: ProxyState = request.app.state.proxy
    session_id = await model_api.session_of(request, state)
    try:
        answer = await state.write(
            areal.reward, session_id, state.limits, value=body.reward, interaction_id=body.interaction_id,
            idempotency_key=keys.repeat_key(request),
        )  # fmt: skip
    except RequestError as refused:
        if refused.code in ("interaction_not_found", "interaction_incomplete"):  # AReaL's clients expect 400
            raise RequestError(400, str(refused), code=refused.code, param=refused.param) from refused
        raise
    return {"message": "success", "applied": answer.applied}


@router.post("/rl/end_session")
async def end_session(request: Request) -> Json:
    """Seal the session. Ending twice is harmless."""
    state: ProxyState = request.app.state.proxy
    session_id = await model_api.session_of(request, state)
    await state.write(sessions.end, session_id, SessionStatus.COMPLETED, None, state.limits)
    state.forget(session_id)
    calls = await state.read(interactions.of_session, session_id)
    delivered = [c for c in calls if c.status == InteractionStatus.COMPLETE and c.role != Role.UPSTREAM]
    return {"message": "success", "interaction_count": len(delivered)}


@router.post("/export_trajectories")
async def export_trajectories(body: ExportBody, request: Request) -> Json:
    """The calls of an ended session with tokens and returns; it stays, and can be exported again. 409 while open.

    `individual`: every call, its prompt and its output. `concat`: every leaf with all that led to it; what several
    share is trained in the first.
    """
    state: ProxyState = request.app.state.proxy
    await _of_runner(request)
    while (status := await _status(request, state, body.session_id)) == SessionStatus.CLOSING:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)  # at most the run's end_grace_s: then the sweep completes it
    if status == SessionStatus.OPEN:
        raise RequestError(409, f"session {body.session_id} has not ended", code="session_open")
    each_call = body.style == "individual"
    found = await state.read(areal.paths, body.session_id, body.discount, each_call=each_call)
    encode = _tensor if body.encoding == "tensor" else _lists
    exported = {path.response_ids[-1]: _individual(path) if each_call else _concat(path) for path in found}
    for item in exported.values():
        item["tensor_dict"] = {name: encode(array) for name, array in item["tensor_dict"].items()}
    return {"interactions": exported, "status": status}


async def _status(request: Request, state: ProxyState, session_id: str) -> str:
    """Raises RequestError 404."""
    await keys.session_caller(request, state, session_id)
    row = await state.read(sessions.get, session_id)
    assert row is not None, "sessions are never deleted"
    return str(row.status)


def _individual(path: Path) -> Json:
    t = path.tokens
    of_call = t.turn_ids == len(path.response_ids) - 1
    value = path.returns[-1]
    return {
        "interaction_id": path.response_ids[-1],
        "reward": value,
        "tensor_dict": _arrays(
            t.input_ids, t.loss_mask, np.where(of_call, t.logprobs, 0.0), np.where(of_call, t.versions, PROMPT_VERSION),
            value or 0.0,
        ),
    }  # fmt: skip


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
    keys.require(await keys.authenticate(request, state), Power.RUN, Power.ADMIN)
    return state


def _without_version(path: str, handle: Callable[[Request], Awaitable[Response]]) -> None:
    """Serve a model route under AReaL's path too; behind it the request reads as one to /v1."""

    async def endpoint(request: Request) -> Response:
        return await handle(Request({**request.scope, "path": path, "raw_path": path.encode()}, request.receive))

    router.add_route(path.removeprefix("/v1"), endpoint, ["POST"], include_in_schema=False)


for _path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    _without_version(_path, metrics.counted(DIALECTS[_path].name, model_api.endpoint(DIALECTS[_path])))
