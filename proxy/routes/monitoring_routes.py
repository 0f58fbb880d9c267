"""Shows runs: `/health`, `/metrics` and `/api/…`, documented by OpenAPI."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from agentrl.domain.schemas import Json
from agentrl.errors import no_session
from agentrl.proxy.access.authentication import Caller, Power
from agentrl.proxy.access.request_bounds import MAX_INT32
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.large_answers import answer
from agentrl.proxy.run_store import RunStore
from agentrl.store import activity, engine_claims, evaluation_episodes, heartbeats, run_view, sample_flow
from agentrl.store.exports import token_rows
from agentrl.store.sessions import session_lookup, session_view
from agentrl.store.views.results import step_pipeline

router = APIRouter(tags=["monitoring"], route_class=GuardedRoute)


async def _reader(request: Request) -> Caller:
    """The caller of a route that shows runs. Raises RequestError 401, 403."""
    return await app_parts.access(request).require(request, Power.RUN, Power.ADMIN)


async def _of_run(request: Request, run_id: str) -> RunStore:
    """The store, for one run. An admin key reads every run of the database, a run's key its own.

    Raises RequestError 401, 403, 404.
    """
    caller, store = await _reader(request), app_parts.store(request)
    if caller.power is not Power.ADMIN and run_id != store.run_id:
        raise run_view.not_found(run_id)
    return store


@router.get("/health")
async def health() -> Json:
    """Answers once the proxy accepts calls. Needs no key."""
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse)
async def prometheus(request: Request) -> Response:
    """The metrics of every worker of this port, in Prometheus' text format."""
    scrape = app_parts.scrape(request)
    if not scrape.public:
        await _reader(request)
    body, content_type = await scrape.text(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.get("/api/status")
async def status(request: Request, window_s: Annotated[float, Query(gt=0, le=600)] = 60.0) -> Json:
    """The run at this moment: version, step, engines, sessions, and the calls that began in the last `window_s`."""
    await _reader(request)
    store = app_parts.store(request)
    found = await store.read(activity.of_run, store.run_id, window_s)
    running = app_parts.scrape(request).engine_calls()
    for engine in found["engines"]:
        engine["running"] = running.get(engine["url"], 0)
    return {**found, "commit_queue": store.database.queued, "replica": store.replica}


@router.get("/api/run")
async def current_run(request: Request) -> Json:
    """The run that this proxy serves."""
    await _reader(request)
    store = app_parts.store(request)
    return await store.read(run_view.of_run, store.run_id)


@router.get("/api/runs")
async def list_runs(request: Request) -> list[Json]:
    """The runs that the key may read, newest first: every run for an admin key, its own for a run key."""
    caller, store = await _reader(request), app_parts.store(request)
    if caller.power is not Power.ADMIN:
        return [await store.read(run_view.of_run, store.run_id)]
    return await store.read(run_view.of_every_run)


@router.get("/api/runs/{run_id}")
async def get_run(run_id: str, request: Request) -> Json:
    """One run: status, versions, admission, groups and trajectories by state."""
    store = await _of_run(request, run_id)
    return await store.read(run_view.of_run, run_id)


@router.get("/api/runs/{run_id}/steps", response_model=list[Json])
async def get_steps(run_id: str, request: Request, after: Annotated[int, Query(ge=0, le=MAX_INT32)] = 0) -> Response:
    """The run's optimizer steps after step `after`, with metrics and staleness."""
    store = await _of_run(request, run_id)
    return await answer(store, run_view.of_steps, run_id, after)


@router.get("/api/runs/{run_id}/steps/{step}/lineage", response_model=list[Json])
async def get_lineage(run_id: str, step: Annotated[int, Path(ge=0, le=MAX_INT32)], request: Request) -> Response:
    """The trajectories and calls that a step trained, with staleness, return and advantage."""
    store = await _of_run(request, run_id)
    return await answer(store, run_view.of_step_lineage, run_id, step)


@router.get("/api/runs/{run_id}/pipeline", response_model=Json)
async def get_pipeline(run_id: str, request: Request) -> Response:
    """Where the time of the newest steps went: their parts, the engines' stalls, what ran when, what bounds the run."""
    store = await _of_run(request, run_id)
    return await answer(store, step_pipeline.of_run, run_id)


@router.get("/api/runs/{run_id}/samples", response_model=Json)
async def get_samples(run_id: str, request: Request) -> Response:
    """Where the samples went: trained, waiting, stale, rejected, open, without calls; by reason."""
    store = await _of_run(request, run_id)
    return await answer(store, sample_flow.of_run, run_id)


@router.get("/api/runs/{run_id}/trajectories/{trajectory_id}/tokens", response_model=Json)
async def get_tokens(run_id: str, trajectory_id: str, request: Request) -> Response:
    """A trajectory token by token: ids, the engine's logprobs and versions, why each token is or is not in the loss
    (`loss_reasons`), the facts that the trainer has measured of it, and the likeliest tokens where calls recorded them
    (`top_logprobs`).
    """
    store = await _of_run(request, run_id)
    return await answer(store, token_rows.of_trajectory, run_id, trajectory_id)


@router.get("/api/runs/{run_id}/events", response_model=list[Json])
async def get_events(run_id: str, request: Request, kind: str | None = None) -> Response:
    """The run's timeline."""
    store = await _of_run(request, run_id)
    return await answer(store, run_view.of_events, run_id, kind)


@router.get("/api/runs/{run_id}/evaluations")
async def get_evaluations(run_id: str, request: Request) -> list[Json]:
    """The run's evaluations by step: mean rewards with 95 % intervals, failures, versions, for each setting."""
    store = await _of_run(request, run_id)
    return [evaluation.as_json() for evaluation in await store.read(evaluation_episodes.of_run, run_id)]


@router.get("/api/runs/{run_id}/evaluations/episodes", response_model=list[Json])
async def get_evaluation_episodes(
    run_id: str, request: Request, version: Annotated[int | None, Query(ge=0, le=MAX_INT32)] = None
) -> Response:
    """Ended evaluation sessions with metadata and reward, of one version or of all, rolled back ones included."""
    store = await _of_run(request, run_id)
    return await answer(store, evaluation_episodes.episodes, run_id, version=version)


@router.get("/api/sessions/{session_id}", response_model=Json)
async def get_session(session_id: str, request: Request) -> Response:
    """A session and its calls."""
    caller, store = await _reader(request), app_parts.store(request)
    if caller.power is not Power.ADMIN and await store.read(session_lookup.run_of, session_id) != store.run_id:
        raise no_session(session_id)
    return await answer(store, session_view.with_calls, session_id)


@router.get("/api/engines")
async def get_engines(request: Request) -> list[Json]:
    """The engines of the run as the store knows them."""
    await _reader(request)
    store = app_parts.store(request)
    return await store.read(engine_claims.of_run, store.run_id)


@router.get("/api/processes")
async def get_processes(request: Request) -> list[Json]:
    """The proxies and rollout workers of the run: host, last heartbeat, the end of its lease, and what each does."""
    await _reader(request)
    store = app_parts.store(request)
    return await store.read(heartbeats.of_run, store.run_id, store.limits.heartbeat_timeout_s)
