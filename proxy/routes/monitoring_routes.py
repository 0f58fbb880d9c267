"""Looking at runs: `/health` and `/api/…`, documented by OpenAPI."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.request_bounds import MAX_INT32
from agentrl.proxy.metrics import counters
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.large_answers import answer
from agentrl.proxy.state import ProxyState
from agentrl.store import activity, engine_turns, evaluation_episodes, run_view
from agentrl.store.sessions import session_lookup, session_view
from agentrl.store.training import lineage

router = APIRouter(tags=["monitoring"], route_class=GuardedRoute)


async def _authenticated(request: Request) -> ProxyState:
    state, _ = await _caller(request)
    return state


async def _caller(request: Request) -> tuple[ProxyState, authentication.Caller]:
    state: ProxyState = request.app.state.proxy
    caller = await authentication.authenticate(request, state)
    authentication.require(caller, authentication.Power.RUN, authentication.Power.ADMIN)
    return state, caller


async def _of_run(request: Request, run_id: str) -> ProxyState:
    """For one run. An admin key reads every run of the database, a run's key its own. Raises RequestError 404."""
    state, caller = await _caller(request)
    if caller.power is not authentication.Power.ADMIN and run_id != state.run_id:
        raise run_view.not_found(run_id)
    return state


@router.get("/health")
async def health() -> Json:
    """Answers as soon as the proxy takes calls; needs no key."""
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse)
async def prometheus(request: Request) -> Response:
    """Prometheus' text format: of every worker of this port."""
    state: ProxyState = request.app.state.proxy
    if not state.metrics_public:
        await _authenticated(request)
    body, content_type = await counters.scrape(state, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.get("/api/status")
async def status(request: Request, window_s: Annotated[float, Query(gt=0, le=600)] = 60.0) -> Json:
    """What the run does just now: version, step, engines, sessions, and the calls that began in the last `window_s`."""
    state = await _authenticated(request)
    found = await state.read(activity.of_run, state.run_id, window_s)
    running = counters.engine_calls(state)
    for engine in found["engines"]:
        engine["running"] = running.get(engine["url"], 0)
    return {**found, "commit_queue": state.database.queued, "replica": state.replica}


@router.get("/api/run")
async def current_run(request: Request) -> Json:
    """The run that this proxy serves."""
    state = await _authenticated(request)
    return await state.read(run_view.of_run, state.run_id)


@router.get("/api/runs")
async def list_runs(request: Request) -> list[Json]:
    """The runs that the key may read, newest first: an admin's every run of the database, a run's its own."""
    state, caller = await _caller(request)
    if caller.power is not authentication.Power.ADMIN:
        return [await state.read(run_view.of_run, state.run_id)]
    return await state.read(run_view.of_every_run)


@router.get("/api/runs/{run_id}")
async def get_run(run_id: str, request: Request) -> Json:
    """One run: status, versions, admission, groups and trajectories by state."""
    state = await _of_run(request, run_id)
    return await state.read(run_view.of_run, run_id)


@router.get("/api/runs/{run_id}/steps", response_model=list[Json])
async def get_steps(run_id: str, request: Request, after: Annotated[int, Query(ge=0, le=MAX_INT32)] = 0) -> Response:
    """The run's optimizer steps behind step `after`, with metrics and staleness."""
    state = await _of_run(request, run_id)
    return await answer(state, run_view.of_steps, run_id, after)


@router.get("/api/runs/{run_id}/steps/{step}/lineage", response_model=list[Json])
async def get_lineage(run_id: str, step: Annotated[int, Path(ge=0, le=MAX_INT32)], request: Request) -> Response:
    """What a step trained: its trajectories and calls with staleness, return and advantage."""
    state = await _of_run(request, run_id)
    return await answer(state, lineage.of_step, run_id, step)


@router.get("/api/runs/{run_id}/events", response_model=list[Json])
async def get_events(run_id: str, request: Request, kind: str | None = None) -> Response:
    """The run's timeline."""
    state = await _of_run(request, run_id)
    return await answer(state, run_view.of_events, run_id, kind)


@router.get("/api/runs/{run_id}/evaluations")
async def get_evaluations(run_id: str, request: Request) -> list[Json]:
    """The run's evaluations by step: mean rewards with 95 % intervals, failures, versions, for each setting."""
    state = await _of_run(request, run_id)
    return [evaluation.as_json() for evaluation in await state.read(evaluation_episodes.of_run, run_id)]


@router.get("/api/runs/{run_id}/evaluations/episodes", response_model=list[Json])
async def get_evaluation_episodes(
    run_id: str, request: Request, version: Annotated[int | None, Query(ge=0, le=MAX_INT32)] = None
) -> Response:
    """Ended evaluation sessions with their metadata and reward, of all versions (rolled back ones too) or of one."""
    state = await _of_run(request, run_id)
    return await answer(state, evaluation_episodes.episodes, run_id, version=version)


@router.get("/api/sessions/{session_id}", response_model=Json)
async def get_session(session_id: str, request: Request) -> Response:
    """A session and its calls."""
    state, caller = await _caller(request)
    if (
        caller.power is not authentication.Power.ADMIN
        and await state.read(session_lookup.run_of, session_id) != state.run_id
    ):
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    return await answer(state, session_view.with_calls, session_id)


@router.get("/api/engines")
async def get_engines(request: Request) -> list[Json]:
    """The engines of the run as the store knows them."""
    state = await _authenticated(request)
    return await state.read(engine_turns.of_run, state.run_id)
