"""The objects that the steps of a model call share."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.proxy.access.heavy_work import Heavy
from agentrl.proxy.calls.call_seeds import CallSeeds
from agentrl.proxy.calls.call_settings import CallSettings
from agentrl.proxy.calls.live_sessions import LiveSessions
from agentrl.proxy.calls.token_tree import TreeCache
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.metrics.counters import Metrics
from agentrl.proxy.run_store import RunStore
from agentrl.rendering import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The objects that the steps of a call use: store, renderer, token trees, engines, metrics."""

    store: RunStore
    sessions: LiveSessions
    renderer: Renderer
    trees: TreeCache
    pool: EnginePool
    heavy: Heavy
    metrics: Metrics
    settings: CallSettings
    seeds: CallSeeds | None = None  # for calls without a seed of their own; None: engines do not sample by seeds
    serving: set[str] = field(default_factory=set)
    """Ids of the calls that this process is answering: `Sweep.close_forgotten` closes the rows of any others."""
