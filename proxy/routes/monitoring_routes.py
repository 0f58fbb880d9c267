"""Looking at runs: `/health` and `/api/…`, documented by OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from sqlalchemy import Connection, Row, select, text
from starlette.responses import PlainTextResponse, Response

from agentrl.domain.schemas import Json
from agentrl.environment import masked
from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.request_bounds import MAX_INT32
from agentrl.proxy.metrics import counters
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.large_answers import answer
from agentrl.proxy.routes.session_routes import session_json
from agentrl.proxy.state import ProxyState
from agentrl.store import activity, evaluation_episodes, events, runs
from agentrl.store.calls import interactions
from agentrl.store.sessions import sessions
from agentrl.store.tables import engines
from agentrl.store.training import steps

router = APIRouter(tags=["monitoring"], route_class=GuardedRoute)
NOT_SHOWN = frozenset({"key_hash", "worker_asked_at", "outside_asked_at", "outside_had_last"})
"""Columns of a run that are the proxy's own business."""


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
        raise _no_run(run_id)
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
    return await state.read(_run_by_id, state.run_id)


@router.get("/api/runs")
async def list_runs(request: Request) -> list[Json]:
    """The runs that the key may read, newest first: an admin's every run of the database, a run's its own."""
    state, caller = await _caller(request)
    if caller.power is not authentication.Power.ADMIN:
        return [await state.read(_run_by_id, state.run_id)]
    return await state.read(lambda conn: [_run_json(conn, row) for row in runs.all_runs(conn)])


@router.get("/api/runs/{run_id}")
async def get_run(run_id: str, request: Request) -> Json:
    """One run: status, versions, admission, groups and trajectories by state."""
    state = await _of_run(request, run_id)
    return await state.read(_run_by_id, run_id)


@router.get("/api/runs/{run_id}/steps", response_model=list[Json])
async def get_steps(run_id: str, request: Request, after: Annotated[int, Query(ge=0, le=MAX_INT32)] = 0) -> Response:
    """The run's optimizer steps behind step `after`, with metrics and staleness."""
    state = await _of_run(request, run_id)
    return await answer(state, _steps_json, run_id, after)


@router.get("/api/runs/{run_id}/steps/{step}/lineage", response_model=list[Json])
async def get_lineage(run_id: str, step: Annotated[int, Path(ge=0, le=MAX_INT32)], request: Request) -> Response:
    """What a step trained: its trajectories and calls with staleness, return and advantage."""
    state = await _of_run(request, run_id)
    return await answer(state, _lineage_json, run_id, step)


@router.get("/api/runs/{run_id}/events", response_model=list[Json])
async def get_events(run_id: str, request: Request, kind: str | None = None) -> Response:
    """The run's timeline."""
    state = await _of_run(request, run_id)
    return await answer(state, lambda conn: [_plain(row) for row in events.of_run(conn, run_id, kind)])


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
    if caller.power is not authentication.Power.ADMIN and await state.read(sessions.run_of, session_id) != state.run_id:
        raise RequestError(404, f"no session {session_id!r}", code="session_not_found")
    return await answer(state, _session_with_calls, session_id)


@router.get("/api/engines")
async def get_engines(request: Request) -> list[Json]:
    """The engines of the run as the store knows them."""
    state = await _authenticated(request)
    return await state.read(
        lambda conn: [_plain(r) for r in conn.execute(select(engines).where(engines.c.run_id == state.run_id))]
    )


def _session_with_calls(conn: Connection, session_id: str) -> Json:
    calls = interactions.of_session(conn, session_id)
    return {**session_json(conn, session_id), "calls": [_plain(call) for call in calls]}


def _plain(row: Row[Any]) -> Json:
    return dict(row._mapping)


def _run_by_id(conn: Connection, run_id: str) -> Json:
    row = next((row for row in runs.all_runs(conn) if row.id == run_id), None)
    if row is None:
        raise _no_run(run_id)
    return _run_json(conn, row)


def _no_run(run_id: str) -> RequestError:
    return RequestError(404, f"no run {run_id!r}", code="run_not_found")


def _run_json(conn: Connection, row: Row[Any]) -> Json:
    public = {k: v for k, v in _plain(row).items() if k not in NOT_SHOWN}
    public["config"] = masked({k: v for k, v in row.config.items() if k != "database_url"})
    return {**public, "steps": row.target_steps, **runs.state_counts(conn, row.id)}


def _steps_json(conn: Connection, run_id: str, after: int) -> list[Json]:
    return [_plain(step) for step in steps.of_run(conn, run_id, after)]


def _lineage_json(conn: Connection, run_id: str, step: int) -> list[Json]:
    query = text(
        "SELECT * FROM lineage WHERE run_id = :run AND step = :step AND step_state != 'rolled_back' "
        "ORDER BY trajectory_id, position"
    )
    return [dict(row._mapping) for row in conn.execute(query, {"run": run_id, "step": step})]
