"""Typed access to the objects that `proxy.composition` builds: each route takes those that it uses.

They are attributes of `app.state`, because the application and its routes exist before the objects do.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request

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


def install(
    app: FastAPI,
    *,
    store: RunStore,
    access: Access,
    body_limits: BodyLimits,
    public_address: PublicAddress,
    pool: EnginePool,
    metrics: Metrics,
    scrape: Scrape,
    context: CallContext,
    answers: AnswerFinder,
    upstreams: Upstreams,
    finder: SessionFinder,
    ends: SessionEnds,
    refusals: RefusalLog,
) -> None:
    """Make the objects available to the routes of `app`."""
    state = app.state
    state.store, state.access, state.body_limits, state.public_address = store, access, body_limits, public_address
    state.pool, state.metrics, state.scrape = pool, metrics, scrape
    state.context, state.answers, state.upstreams = context, answers, upstreams
    state.finder, state.ends, state.refusals = finder, ends, refusals


def store(request: Request) -> RunStore:
    """The run's part of the database."""
    found: RunStore = request.app.state.store
    return found


def access(request: Request) -> Access:
    """Authentication."""
    found: Access = request.app.state.access
    return found


def body_limits(request: Request) -> BodyLimits:
    """The limits on the size and the arrival time of a body."""
    found: BodyLimits = request.app.state.body_limits
    return found


def public_address(request: Request) -> PublicAddress:
    """The URL under which clients reach the proxy."""
    found: PublicAddress = request.app.state.public_address
    return found


def pool(request: Request) -> EnginePool:
    """The engines."""
    found: EnginePool = request.app.state.pool
    return found


def metrics(request: Request) -> Metrics:
    """The counters of this process."""
    found: Metrics = request.app.state.metrics
    return found


def scrape(request: Request) -> Scrape:
    """The metrics of all workers of this port."""
    found: Scrape = request.app.state.scrape
    return found


def context(request: Request) -> CallContext:
    """The objects that the steps of a model call share."""
    found: CallContext = request.app.state.context
    return found


def answers(request: Request) -> AnswerFinder:
    """Finds the answer to each request."""
    found: AnswerFinder = request.app.state.answers
    return found


def upstreams(request: Request) -> Upstreams:
    """The other models that calls may name."""
    found: Upstreams = request.app.state.upstreams
    return found


def finder(request: Request) -> SessionFinder:
    """Finds the session of a request."""
    found: SessionFinder = request.app.state.finder
    return found


def ends(request: Request) -> SessionEnds:
    """Ends sessions."""
    found: SessionEnds = request.app.state.ends
    return found


def refusals(request: Request) -> RefusalLog:
    """Records refused calls."""
    found: RefusalLog = request.app.state.refusals
    return found
