"""Typed access to the objects that `proxy.composition` builds: each route takes those that it uses.

They are attributes of `app.state`, because the application and its routes exist before the objects do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request

from agentrl.engine.engine_connections import EngineConnections
from agentrl.proxy.access.authentication import Access
from agentrl.proxy.access.public_address import PublicAddress
from agentrl.proxy.access.request_body import BodyLimits
from agentrl.proxy.calls.answer_finder import AnswerFinder
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.upstreams.upstream_calls import Upstreams
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.metrics.counters import Metrics
from agentrl.proxy.metrics.scrape import Scrape
from agentrl.proxy.run_store import RunStore
from agentrl.proxy.sessions.refusals import RefusalLog
from agentrl.proxy.sessions.session_ends import SessionEnds
from agentrl.proxy.sessions.session_finder import SessionFinder
from agentrl.versions.version_files import VersionFiles
from agentrl.versions.version_uploads import Uploads

T = TypeVar("T")


def install(
    app: FastAPI,
    *,
    store: RunStore,
    access: Access,
    body_limits: BodyLimits,
    public_address: PublicAddress,
    pool: EnginePool,
    engine_connections: EngineConnections,
    metrics: Metrics,
    scrape: Scrape,
    context: CallContext,
    answers: AnswerFinder,
    upstreams: Upstreams,
    finder: SessionFinder,
    ends: SessionEnds,
    refusals: RefusalLog,
    version_files: VersionFiles,
    uploads: Uploads,
) -> None:
    """Make the objects available to the routes of `app`."""
    state = app.state
    state.store, state.access, state.body_limits, state.public_address = store, access, body_limits, public_address
    state.pool, state.engine_connections, state.metrics, state.scrape = pool, engine_connections, metrics, scrape
    state.context, state.answers, state.upstreams = context, answers, upstreams
    state.finder, state.ends, state.refusals = finder, ends, refusals
    state.version_files, state.uploads = version_files, uploads


def _part(name: str, kind: type[T]) -> Callable[[Request], T]:
    def part(request: Request) -> T:
        found: T = getattr(request.app.state, name)
        return found

    return part


store = _part("store", RunStore)  # the run's part of the database
access = _part("access", Access)  # authentication
body_limits = _part("body_limits", BodyLimits)  # the limits on the size and the arrival time of a body
public_address = _part("public_address", PublicAddress)  # the URL under which clients reach the proxy
pool = _part("pool", EnginePool)  # the engines
engine_connections = _part("engine_connections", EngineConnections)  # connects to engines, also to those that join
metrics = _part("metrics", Metrics)  # the counters of this process
scrape = _part("scrape", Scrape)  # the metrics of all workers of this port
context = _part("context", CallContext)  # the objects that the steps of a model call share
answers = _part("answers", AnswerFinder)  # finds the answer to each request
upstreams = _part("upstreams", Upstreams)  # the other models that calls may name
finder = _part("finder", SessionFinder)  # finds the session of a request
ends = _part("ends", SessionEnds)  # ends sessions
refusals = _part("refusals", RefusalLog)  # records refused calls
version_files = _part("version_files", VersionFiles)  # serves the files of weight versions
uploads = _part("uploads", Uploads)  # receives them
