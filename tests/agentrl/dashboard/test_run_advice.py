"""Each note appears when its facts are there, leads to its evidence, and is absent on a healthy run."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentrl.dashboard import run_advice
from agentrl.dashboard.run_advice import RECENT

STEPS = 30
S = "/ui/sessions/s1"
R = "/ui/runs/r"


def metrics(**changed: list[float]) -> dict[str, Any]:
    rising = [0.2 + 0.5 * n / STEPS for n in range(STEPS)]
    healthy = {
        "logprob_mismatch_mean_abs": [0.004] * STEPS,
        "importance_ratio/ess": [0.97] * STEPS,
        "reward/mean": rising,
        "entropy": [0.8] * STEPS,
        "advantage/zero_groups": [0.2] * STEPS,
    }
    return {"step": list(range(1, STEPS + 1)), "at": [0.0] * STEPS, "metrics": healthy | changed}


def evaluation(reward: float, *, complete: bool = True) -> dict[str, Any]:
    return {
        "complete": complete,
        "settings": {"greedy": {"reward": reward, "low": reward - 0.05, "high": reward + 0.05}},
    }


HEALTHY: dict[str, Any] = {
    "run": {"name": "r", "status": "running", "error": None, "version": 30},
    "faults": {
        "sessions": {
            "ended": 200, "failed": 4, "error": "timed out", "error_times": 3, "example": "s1", "streak": 0,
            "all_fail_since": None,
        },
        "calls": {
            "calls": 1000, "forks": [{"reason": "history_edited", "calls": 20, "example": "s1"}], "truncated": 30,
            "truncated_example": "s1", "failed": 3, "failed_example": "s1", "error": "engine lost",
        },
        "tools": [{"name": "calculator", "results": 100, "errors": 3, "example": "s1", "error": "error: x"}],
    },
    "engines": [{"url": "http://e", "state": "serving", "version": 30, "error": None}],
    "flow": {"samples": 1000, "bands": [{"band": "stale", "reason": "too_old", "samples": 50, "tokens": 1}]},
    "series": metrics(),
    "evaluations": [evaluation(0.3), evaluation(0.5)],
}  # fmt: skip


def notes(**changed: Any) -> list[run_advice.Note]:
    """The notes on a healthy run with these facts in place of its own."""
    facts = deepcopy(HEALTHY)
    for name, value in changed.items():
        part, _, inner = name.partition("__")
        if inner:
            value = {inner: facts[part][inner] | value}
        facts[part] = facts[part] | value if isinstance(value, dict) else value
    return run_advice.of_run(**facts)


def test_a_healthy_run_has_no_note() -> None:
    assert notes() == []


FALLING = [1.0] * RECENT + [0.5] * (STEPS - 2 * RECENT) + [0.05] * RECENT
FLAT = [0.4, 0.6] * (STEPS // 2)
BY_ENGINE = {
    "mismatch/engine/e:1": [0.004] * STEPS,
    "mismatch/engine/e:2": [math.nan] * 2 + [0.04] * (STEPS - 2),
    "mismatch/engine/several": [0.5] * STEPS,
}
PLANTED = [
    ({"run": {"status": "failed", "error": "no memory"}}, "bad", "the run has failed: no memory", f"{R}/events"),
    ({"faults__sessions": {"streak": 25}}, "bad", "the last 25 sessions have all failed: timed out", S),
    ({"faults__sessions": {"failed": 90}}, "warn", "90 of the last 200 sessions", f"{R}/search?status=failed"),
    (
        {"engines": [{"url": "http://e", "state": "dead", "version": 3, "error": None}]},
        "bad", "no engine answers", f"{R}/engines",
    ),
    (
        {"engines": [*HEALTHY["engines"], {"url": "http://f", "state": "dead", "version": 3, "error": "gone"}]},
        "warn", "http://f does not answer: gone", f"{R}/engines",
    ),
    (
        {"engines": [{"url": "http://e", "state": "serving", "version": 28, "error": None}]},
        "bad", "serves version 28, 2 behind", f"{R}/engines",
    ),
    (
        {"series": metrics(logprob_mismatch_mean_abs=[0.004] * 25 + [0.3, 0.9, 0.3, 0.3, 0.3])},
        "bad", "engine and trainer disagree by 0.212 nats", f"{R}/steps/27",
    ),
    (
        {"series": metrics(logprob_mismatch_mean_abs=[0.3] * STEPS, **BY_ENGINE)},
        "bad", "disagree by 0.3 nats a token (most at engine e:2: 0.04)", f"{R}/steps/30",
    ),
    (
        {"series": metrics(**BY_ENGINE)},
        "bad", "e:2 and the trainer disagree by 0.04 nats a token with the same weights, all engines by 0.004",
        f"{R}/engines",
    ),
    ({"series": metrics(**{"importance_ratio/ess": [0.3] * STEPS})}, "warn", "30% of the tokens", f"{R}/steps/30"),
    ({"series": metrics(entropy=FALLING)}, "warn", "the entropy has fallen from 1 to 0.05", f"{R}#learning"),
    ({"series": metrics(entropy=FALLING, **{"reward/mean": FLAT})}, "bad", "and the reward is flat", f"{R}#learning"),
    (
        {"evaluations": [evaluation(0.3), evaluation(0.7), evaluation(0.4)]},
        "bad", "the held-out reward has fallen from 0.7 to 0.4", f"{R}/evaluations",
    ),
    ({"series": metrics(**{"advantage/zero_groups": [0.8] * STEPS})}, "warn", "in 80% of the groups", f"{R}/tasks"),
    (
        {"faults": {"tools": [{"name": "sql", "results": 40, "errors": 30, "example": "s1", "error": "no table"}]}},
        "bad", "30 of the last 40 results of tool sql are errors: no table", S,
    ),
    (
        {"faults__calls": {"forks": [{"reason": "tools_changed", "calls": 400, "example": "s1"}]}},
        "bad", "400 of the last 1000 calls could not extend an earlier one, most often because of tools_changed", S,
    ),
    ({"faults__calls": {"truncated": 500}}, "warn", "500 of the last 1000 calls ended at their length limit", S),
    ({"faults__calls": {"failed": 600}}, "bad", "600 of the last 1000 calls have failed: engine lost", S),
    (
        {"flow": {"bands": [{"band": "stale", "reason": "too_old", "samples": 300, "tokens": 1}]}},
        "warn", "30% of the samples were too old", f"{R}/samples?band=stale&reason=too_old",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "level", "text", "href"), PLANTED, ids=[row[2] for row in PLANTED])
def test_a_fault_has_one_note_that_leads_to_its_evidence(facts: dict, level: str, text: str, href: str) -> None:
    (note,) = notes(**facts)
    assert (note.level, note.href) == (level, href)
    assert text in note.text


def test_the_most_urgent_notes_come_first_and_lead_to_our_pages() -> None:
    found = notes(
        run={"status": "failed"},
        series=metrics(**{"importance_ratio/ess": [0.1] * STEPS}),
        faults__calls={"failed": 600},
    )
    assert [note.level for note in found] == ["bad", "bad", "warn"]
    assert all(urlsplit(note.href).path.startswith("/ui/") and not urlsplit(note.href).netloc for note in found)


def test_a_run_that_has_just_begun_has_no_note() -> None:
    nothing: dict[str, Any] = {"step": [], "at": [], "metrics": {}}
    few: dict[str, Any] = {
        "sessions": {"ended": 3, "failed": 3, "error": "x", "error_times": 3, "example": "s1", "streak": 3}
    }
    few |= {"calls": {"calls": 2, "forks": [], "truncated": 2, "failed": 2}, "tools": []}
    assert notes(series=nothing, evaluations=[], engines=[], flow={"samples": 0, "bands": []}, faults=few) == []


def test_steps_without_a_number_are_left_out() -> None:
    holes = [None, float("nan")] * (STEPS // 2)
    assert notes(series=metrics(**{"logprob_mismatch_mean_abs": holes, "importance_ratio/ess": holes})) == []


def test_an_evaluation_that_is_not_complete_does_not_count() -> None:
    unsure = evaluation(0.1, complete=False)
    assert notes(evaluations=[evaluation(0.5), evaluation(0.6), unsure]) == []
