"""Orders to SGLang's schedulers, carried by the free-text action of `/weights_checker`.

That request takes no lock and is handled between two decode steps, in every rank. The answer is JSON in its message:

    agentrl:stage {"name", "folder", "digests"}     begin to stage in a thread
    agentrl:staged                                  the state that all ranks have reached
    agentrl:digests                                 the digests of the staged weights, as those of `checksum`
    agentrl:swap {"name", "version", "flush_cache"}  exchange in all ranks or in none; only while paused
    agentrl:discard                                 forget what is staged

Imported inside SGLang's processes only.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agentrl.domain.schemas import Json
from agentrl.engine.control.preparation import UNDEFINED, PreparationState
from agentrl.engine.prepared.staging import Staged, Staging

log = logging.getLogger(__name__)
PREFIX = "agentrl:"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = ("update_weights_from_disk", "begin_weight_update", "update_weights_from_ipc")
"""Methods that load other weights: what is staged may keep tensors of those before."""
RELEASE = "release_memory_occupation"
FLUSH = "flush_cache_after_weight_update"
GRAMMARS = ("has_waiting_grammars", "get_ready_grammar_requests")
"""Methods of a scheduler's `grammar_manager`."""
GRAMMAR_ROUNDS = 2000
"""How often to look whether grammars are compiled: SGLang waits up to 5 ms each time."""
FIELDS: dict[str, dict[str, type]] = {
    "stage": {"name": str, "folder": str, "digests": bool},
    "staged": {},
    "digests": {},
    "swap": {"name": str, "version": int, "flush_cache": bool},
    "discard": {},
}
"""The orders, and the fields of their bodies."""
T = TypeVar("T")


class SchedulerHook:
    """Answers the orders in one scheduler's process, whose `SchedulerWeightUpdaterManager` comes with each call."""

    def __init__(self) -> None:
        self._staging: Staging | None = None

    def register(self) -> None:
        """Hook SGLang's methods; called by its plugin loader."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{MANAGER}.check_weights", self.check_weights, HookType.AROUND)
        HookRegistry.register(f"{MANAGER}.{RELEASE}", self.before_release, HookType.BEFORE)
        for method in UPDATES:
            HookRegistry.register(f"{MANAGER}.{method}", self.before_update, HookType.BEFORE)
        HookRegistry.register(f"{MANAGER}.{FLUSH}", self.before_flush, HookType.BEFORE)

    def before_update(self, *_: Any, **__: Any) -> None:
        """Forget what is staged."""
        if self._staging is not None:
            self._staging.discard()

    def before_flush(self, manager: Any, request: Any, *_: Any, **__: Any) -> None:
        """Let no request with a grammar keep a paused scheduler from flushing its cache after an update."""
        if request.flush_cache:
            drain_grammars(manager.scheduler)

    def before_release(self, *_: Any, **__: Any) -> None:
        """Free the memory of the shadow."""
        if self._staging is not None:
            self._staging.discard(free=True)

    def check_weights(self, original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
        """Answer an order of ours; pass other requests on."""
        if not request.action.startswith(PREFIX):
            return original(manager, request)
        from sglang.srt.managers.io_struct import CheckWeightsReqOutput

        problem = unsupported(manager)
        if problem is not None:
            return CheckWeightsReqOutput(success=False, message=problem)
        if self._staging is None:
            self._staging = staging_of(manager)
        try:
            order, body = parsed(request.action)
        except ValueError as error:
            return CheckWeightsReqOutput(success=False, message=str(error))
        answer = self._answer(order, body, manager, self._staging)
        return CheckWeightsReqOutput(success=True, message=json.dumps(answer))

    def _answer(self, order: str, body: Json, manager: Any, staging: Staging) -> Json:
        if order == "stage":
            return _begin(staging, Staged(body["name"], Path(body["folder"]), body["digests"]))
        if order == "swap":
            return _swap(manager, staging, body)
        if order == "digests":
            staged = staging.staged
            return {"ranks": _gathered(manager, None if staged is None else staged.digests)}
        if order == "discard":
            staging.discard()
        return _combined(_gathered(manager, _state(staging)))


def parsed(action: str) -> tuple[str, Json]:
    """The order of an action, and its body. Raises ValueError: an exception would end the scheduler."""
    order, _, rest = action.removeprefix(PREFIX).partition(" ")
    try:
        body = json.loads(rest or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{order[:40]!r} has no JSON body") from error
    types = FIELDS.get(order)
    if types is None or not isinstance(body, dict) or {name: type(value) for name, value in body.items()} != types:
        raise ValueError(f"{order[:40]!r} is no order with these fields")
    return order, body


def _begin(staging: Staging, staged: Staged) -> Json:
    if staging.is_busy:
        return {"state": PreparationState.FAILED, "error": "the staging before has not ended", "name": staged.name}
    staging.start(staged)
    return _state(staging)


def _state(staging: Staging) -> Json:
    staged = staging.staged
    if staged is None:
        state = PreparationState.STAGING if staging.is_busy else PreparationState.NONE
        return {"name": None, "state": state, "error": None, "stage_s": 0.0}
    return {"name": staged.name, "state": staged.state, "error": staged.error, "stage_s": staged.seconds}


def _combined(states: list[Json]) -> Json:
    """The state that all ranks have reached: failed if one has failed, staging while one is."""
    for state in (PreparationState.FAILED, PreparationState.STAGING, PreparationState.NONE):
        if found := [rank for rank in states if rank["state"] == state]:
            return found[0]
    return max(states, key=lambda rank: float(rank["stage_s"]))


def _swap(manager: Any, staging: Staging, body: Json) -> Json:
    """Exchange in all ranks or in none. `swapped` is null when some rank failed: the weights are then undefined."""
    if body["flush_cache"]:
        drain_grammars(manager.scheduler)
    problem = next(filter(None, _gathered(manager, _refusal(manager, staging, body))), None)
    if problem is not None:
        return {"swapped": False, "error": problem}
    began = time.perf_counter()
    failure = _exchange(manager, staging, flush_cache=body["flush_cache"])
    failure = next(filter(None, _gathered(manager, failure)), None)
    label = UNDEFINED if failure else str(body["version"])
    manager.scheduler.record_weight_version_change(new_version=label)
    return {"swapped": None if failure else True, "swap_s": time.perf_counter() - began, "error": failure}


def _exchange(manager: Any, staging: Staging, *, flush_cache: bool) -> str | None:
    """Exchange the weights of this rank; returns the error."""
    try:
        staging.exchange()
    except (RuntimeError, TypeError, ValueError) as error:
        log.exception("the weights could not be exchanged")
        return f"{type(error).__name__}: {error}"
    if flush_cache and not manager.flush_cache(empty_cache=False):
        return "the cache of the old weights could not be flushed"
    return None


def _refusal(manager: Any, staging: Staging, body: Json) -> str | None:
    """Why this rank cannot swap now; None when it can."""
    staged, scheduler = staging.staged, manager.scheduler
    if staged is None or staged.name != body["name"] or staged.state is not PreparationState.READY:
        return f"{body['name']} is not staged"
    if not scheduler._engine_paused:
        return "the engine is not paused"
    if body["flush_cache"] and not manager.is_fully_idle(ignore_waiting=True):
        return "requests are running: their cache cannot be flushed"
    return None


def drain_grammars(scheduler: Any) -> None:
    """Let the requests of a paused scheduler whose grammars are being compiled wait with the others.

    Otherwise they leave their queue only when a batch is scheduled, and with them the scheduler is not idle. All ranks
    have the same requests there, and each round is collective: hence a number of rounds, and no limit of time. Pipeline
    stages handle an order one after another, and could not take part together.
    """
    queue: Any = getattr(scheduler, "grammar_manager", None)
    if not all(hasattr(queue, method) for method in GRAMMARS) or not hasattr(scheduler, "_add_request_to_queue"):
        return
    if not scheduler._engine_paused or getattr(queue, "pp_size", 1) > 1:
        return
    for _ in range(GRAMMAR_ROUNDS):
        if not queue.has_waiting_grammars():
            return
        for request in queue.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)


def _gathered(manager: Any, value: T) -> list[T]:
    """The values of all tensor ranks, which handle the same order at the same step."""
    import torch.distributed as dist

    ranks = dist.get_world_size(group=manager.tp_cpu_group)
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value, group=manager.tp_cpu_group)
    return values


def unsupported(manager: Any) -> str | None:
    """Why this server cannot prepare versions; the same in all ranks."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
    from sglang.srt.runtime_context import get_model, get_parallel

    runner = manager.tp_worker.model_runner
    if get_parallel().pp_size > 1:
        return "a server of several pipeline stages cannot prepare versions"
    if manager.draft_worker is not None and manager._select_runners("draft"):
        return "a server with a draft model cannot prepare versions"
    if get_model().weight_cache_mode != "off":
        return "a server with a weight cache cannot prepare versions"
    if runner.device != "cpu" and getattr(runner.model, "quant_config", None) is not None:
        return "a server that quantizes on a GPU cannot prepare versions"
    error: str | None = _unsupported_derived_weight_cache_error(runner.model)
    return error


def staging_of(manager: Any) -> Staging:
    """The staging of a scheduler's model."""
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.utils.weight_checker import WeightChecker

    runner = manager.tp_worker.model_runner

    def load(model: Any, tensors: Any, device: torch.device) -> None:
        DefaultModelLoader.restore_weights_before_loading(model, device)
        DefaultModelLoader.load_weights_and_postprocess(model, tensors, device)

    def digest(model: Any) -> dict[str, Any]:
        found: dict[str, Any] = WeightChecker(get_model=lambda: model).handle("checksum", role="target")
        return dict(found["checksums"])

    return Staging(runner.model, load, digest, next(runner.model.parameters()).device)


hook = SchedulerHook()
