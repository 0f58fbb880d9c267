"""Orders to a scheduler: what they may be, and that all ranks swap or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engine.control.preparation import UNDEFINED, PreparationState
from agentrl.engine.prepared import scheduler_hook
from agentrl.engine.prepared.scheduler_hook import SchedulerHook, parsed
from agentrl.engine.prepared.staging import Staged

SWAP = {"name": "v1-a", "version": 1, "flush_cache": True}


class Grammars:
    """Requests whose grammars are being compiled, each for so many rounds."""

    def __init__(self, rounds: dict[str, int]) -> None:
        self.rounds = rounds
        self.asked = 0

    def has_waiting_grammars(self) -> bool:
        return bool(self.rounds)

    def get_ready_grammar_requests(self) -> list[str]:
        self.asked += 1
        self.rounds = {name: left - 1 for name, left in self.rounds.items()}
        ready = [name for name, left in self.rounds.items() if left <= 0]
        self.rounds = {name: left for name, left in self.rounds.items() if left > 0}
        return ready


class Scheduler:
    """A scheduler's state, as the hook sees it; it is its own weight updater."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self.scheduler = self
        self.grammar_manager = grammars or Grammars({})
        self.waiting = ["first"]
        self._engine_paused = True
        self.idle = True
        self.flushes = True
        self.labels: list[str] = []

    def is_fully_idle(self, *, ignore_waiting: bool) -> bool:
        return self.idle and not self.grammar_manager.rounds

    def _add_request_to_queue(self, request: str) -> None:
        self.waiting.append(request)

    def flush_cache(self, *, empty_cache: bool) -> bool:
        return self.flushes

    def record_weight_version_change(self, *, new_version: str) -> None:
        self.labels.append(new_version)


class Ready:
    """A staging that is ready, and whose exchange may fail."""

    def __init__(self, state: PreparationState = PreparationState.READY) -> None:
        self.staged: Staged | None = Staged("v1-a", None, False, state=state)  # type: ignore[arg-type]
        self.is_busy = False
        self.exchanged = 0
        self.error: Exception | None = None

    def exchange(self) -> None:
        if self.error is not None:
            raise self.error
        self.exchanged += 1
        self.staged = None


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values of the other ranks, by call of the hook's gathering."""
    script: list[Any] = []
    monkeypatch.setattr(scheduler_hook, "_gathered", lambda _, mine: [mine, *(script.pop(0) if script else ())])
    return script


def swapped(scheduler: Scheduler, staging: Ready, **changes: Any) -> Any:
    return scheduler_hook._swap(scheduler, staging, SWAP | changes)  # type: ignore[arg-type]


def test_all_ranks_swap(others: list[Any]) -> None:
    scheduler, staging = Scheduler(), Ready()
    others += [[None], [None]]
    assert swapped(scheduler, staging)["swapped"] is True
    assert (staging.exchanged, scheduler.labels) == (1, ["1"])


@pytest.mark.parametrize("why", ["not paused", "not staged", "cache", "another rank"])
def test_no_rank_swaps_when_one_cannot(others: list[Any], why: str) -> None:
    scheduler, staging = Scheduler(), Ready()
    scheduler._engine_paused = why != "not paused"
    scheduler.idle = why != "cache"
    if why == "not staged":
        staging = Ready(PreparationState.STAGING)
    others += [[why if why == "another rank" else None]]
    answer = swapped(scheduler, staging)
    assert answer["swapped"] is False
    assert why in answer["error"]
    assert (staging.exchanged, scheduler.labels) == (0, [])


def test_another_version_is_not_swapped_in(others: list[Any]) -> None:
    assert swapped(Scheduler(), Ready(), name="v2-a")["swapped"] is False


def test_a_cache_that_is_in_use_may_be_kept(others: list[Any]) -> None:
    scheduler = Scheduler()
    scheduler.idle = False
    assert swapped(scheduler, Ready(), flush_cache=False)["swapped"] is True


def test_requests_whose_grammars_are_compiled_meanwhile_do_not_prevent_a_swap(others: list[Any]) -> None:
    scheduler = Scheduler(Grammars({"slow": 3, "fast": 1}))
    assert swapped(scheduler, Ready())["swapped"] is True
    assert (scheduler.waiting, scheduler.grammar_manager.asked) == (["first", "fast", "slow"], 3)


def test_a_grammar_that_takes_too_long_refuses_the_swap(others: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_hook, "GRAMMAR_ROUNDS", 5)
    scheduler = Scheduler(Grammars({"endless": 6}))
    assert swapped(scheduler, Ready())["swapped"] is False
    assert (scheduler.waiting, scheduler.grammar_manager.asked) == (["first"], 5)


@pytest.mark.parametrize(("paused", "flush", "asked"), [(True, True, 2), (True, False, 0), (False, True, 0)])
def test_grammars_are_awaited_before_the_flush_of_a_paused_scheduler(paused: bool, flush: bool, asked: int) -> None:
    scheduler = Scheduler(Grammars({"one": 2}))
    scheduler._engine_paused = paused
    SchedulerHook().before_flush(scheduler, SimpleNamespace(flush_cache=flush), True, "")
    assert scheduler.grammar_manager.asked == asked


def test_stages_of_a_pipeline_and_other_versions_of_sglang_are_left_alone() -> None:
    stages = Scheduler(Grammars({"one": 1}))
    stages.grammar_manager.pp_size = 2  # type: ignore[attr-defined]
    scheduler_hook.drain_grammars(stages)
    assert stages.grammar_manager.asked == 0
    scheduler_hook.drain_grammars(SimpleNamespace(_engine_paused=True))
    scheduler_hook.drain_grammars(SimpleNamespace(_engine_paused=True, grammar_manager=object()))


@pytest.mark.parametrize("where", ["here", "there", "cache"])
def test_weights_are_undefined_when_a_rank_has_failed(others: list[Any], where: str) -> None:
    scheduler, staging = Scheduler(), Ready()
    if where == "here":
        staging.error = RuntimeError("out of memory")
    scheduler.flushes = where != "cache"
    others += [[None], ["rank 1 failed" if where == "there" else None]]
    answer = swapped(scheduler, staging)
    assert answer["swapped"] is None
    assert answer["error"]
    assert scheduler.labels == [UNDEFINED]


@pytest.mark.parametrize(
    ("states", "found"),
    [
        (["ready", "ready"], "ready"),
        (["ready", "staging"], "staging"),
        (["staging", "failed"], "failed"),
        (["ready", "none"], "none"),
        (["none", "staging"], "staging"),
    ],
)
def test_the_state_is_the_one_that_all_ranks_have_reached(states: list[str], found: str) -> None:
    ranks = [{"state": state, "stage_s": index} for index, state in enumerate(states)]
    assert scheduler_hook._combined(ranks)["state"] == found


@pytest.mark.parametrize(
    "action",
    [
        "",
        "erase",
        "stage",
        "stage {",
        "stage []",
        'stage {"name": "v1-a"}',
        'stage {"name": 1, "folder": "/w", "digests": true}',
        'swap {"name": "v1-a", "version": true, "flush_cache": true}',
        "staged {}x",
        "stage " + "[" * 100_000,
    ],
    ids=range(10),
)
def test_an_order_that_is_none_is_refused(action: str) -> None:
    with pytest.raises(ValueError, match=r"no order|no JSON"):
        parsed(f"agentrl:{action}")


def test_an_order_is_read_with_its_body() -> None:
    assert parsed("agentrl:staged") == ("staged", {})
    body = {"name": "v1-a", "folder": "/w", "digests": False}
    assert parsed('agentrl:stage {"name": "v1-a", "folder": "/w", "digests": false}') == ("stage", body)
