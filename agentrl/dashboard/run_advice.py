"""Advice: what a person should look at first, from facts that the page has read. Each note leads to its evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.domain.schemas import Json

RECENT = 10
"""Steps whose mean is compared with that of the first ones."""
MISMATCH = 0.02
"""Mean |engine − trainer| of logprobs, in nats. Two implementations of one model in bfloat16 differ by less."""
FEW_SAMPLES = 0.5
"""Effective sample size, as a share of the tokens."""
FORKS, TRUNCATED, FAILED, TOOL_ERRORS, STALE, TIED = 0.2, 0.3, 0.3, 0.3, 0.2, 0.6
"""Shares from which a note is written."""
LEAST = 10
"""Rows from which a share means something."""


@dataclass(frozen=True, slots=True)
class Note:
    """One line of advice; `level` is `bad` or `warn`, `href` where the evidence is."""

    level: str
    text: str
    href: str


def of_run(
    run: Json, faults: Json, engines: Sequence[Json], flow: Json, series: Json, evaluations: Sequence[Json]
) -> list[Note]:
    """The notes on a run, the most urgent first."""
    here = f"/ui/runs/{run['name']}"
    found = [
        *_run_itself(run, here),
        *_sessions(faults["sessions"], here),
        *_engines(engines, run, here),
        *_honesty(series, here),
        *_learning(series, evaluations, here),
        *_tools(faults["tools"]),
        *_calls(faults["calls"], here),
        *_samples(flow, here),
    ]
    return sorted(found, key=lambda note: note.level != "bad")


def _run_itself(run: Json, here: str) -> Iterator[Note]:
    if run["status"] == "failed":
        yield Note("bad", f"the run has failed: {run['error'] or 'no reason is recorded'}", f"{here}/events")


def _sessions(found: Json, here: str) -> Iterator[Note]:
    if found["streak"] >= LEAST:
        href = f"/ui/sessions/{found['example']}"
        yield Note("bad", f"the last {found['streak']} sessions have all failed: {found['error']}", href)
    elif found["ended"] >= LEAST and found["failed"] > FAILED * found["ended"]:
        share = f"{found['failed']} of the last {found['ended']} sessions have failed"
        yield Note("warn", f"{share}; most often: {found['error']}", f"{here}/search?status=failed")


def _engines(engines: Sequence[Json], run: Json, here: str) -> Iterator[Note]:
    if engines and all(engine["state"] == "dead" for engine in engines):
        yield Note("bad", "no engine answers", f"{here}/engines")
        return
    for engine in engines:
        behind = run["version"] - (engine["version"] if engine["version"] is not None else run["version"])
        if engine["state"] == "dead":
            yield Note(
                "warn", f"engine {engine['url']} does not answer: {engine['error'] or 'no reason'}", f"{here}/engines"
            )
        elif behind > 0 and engine["state"] == "serving":
            yield Note(
                "bad",
                f"engine {engine['url']} serves version {engine['version']}, {behind} behind the run",
                f"{here}/engines",
            )


def _honesty(series: Json, here: str) -> Iterator[Note]:
    mismatch = _recent(series, "logprob_mismatch_mean_abs")
    by_engine = sorted((gap, name) for name, gap in _mismatch_by_engine(series).items())
    if mismatch is not None and mismatch > MISMATCH:
        worst = _step_of_largest(series, "logprob_mismatch_mean_abs")
        most = f" (most at engine {by_engine[-1][1]}: {by_engine[-1][0]:.3g})" if len(by_engine) > 1 else ""
        text = (
            f"engine and trainer disagree by {mismatch:.3g} nats a token{most} with the same weights: compare the "
            "temperature, the chat template and the number format of both"
        )
        yield Note("bad", text, f"{here}/steps/{worst}")
    elif mismatch is not None and by_engine and by_engine[-1][0] > MISMATCH:
        gap, name = by_engine[-1]
        text = (
            f"engine {name} and the trainer disagree by {gap:.3g} nats a token with the same weights, all engines by "
            f"{mismatch:.3g}"
        )
        yield Note("bad", text, f"{here}/engines")
    sample_size = _recent(series, "importance_ratio/ess")
    if sample_size is not None and sample_size < FEW_SAMPLES:
        worst = series["step"][-1]
        yield Note(
            "warn",
            f"the effective sample size is {sample_size:.0%} of the tokens: the policy is far from the data",
            f"{here}/steps/{worst}",
        )


def _learning(series: Json, evaluations: Sequence[Json], here: str) -> Iterator[Note]:
    rewards, entropy = _values(series, "reward/mean"), _values(series, "entropy")
    gain = _gain(rewards)
    if len(entropy) >= 2 * RECENT and fmean(entropy[-RECENT:]) < 0.2 * fmean(entropy[:RECENT]):
        flat = ", and the reward is flat" if gain is not None and abs(gain) < 0.02 * _spread(rewards) else ""
        text = f"the entropy has fallen from {fmean(entropy[:RECENT]):.3g} to {fmean(entropy[-RECENT:]):.3g}{flat}"
        yield Note("bad" if flat else "warn", text, f"{here}#learning")
    held_out = [one for each in evaluations if (one := _held_out(each)) is not None]
    if gain is not None and len(held_out) >= 2:
        best = max(held_out[:-1], key=lambda one: one[0])
        if gain > 0 and held_out[-1][2] < best[1]:
            text = (
                f"the training reward rises, but the held-out reward has fallen from {best[0]:.3g} to "
                f"{held_out[-1][0]:.3g}: the policy may exploit the reward"
            )
            yield Note("bad", text, f"{here}/evaluations")
    tied = _recent(series, "advantage/zero_groups")
    if tied is not None and tied > TIED:
        yield Note(
            "warn",
            f"in {tied:.0%} of the groups all episodes have the same return: they teach nothing",
            f"{here}/tasks",
        )


def _tools(tools: Sequence[Json]) -> Iterator[Note]:
    for tool in tools:
        if tool["results"] >= LEAST and tool["errors"] > TOOL_ERRORS * tool["results"]:
            share = f"{tool['errors']} of the last {tool['results']} results of tool {tool['name']} are errors"
            yield Note("bad", f"{share}: {tool['error']}", f"/ui/sessions/{tool['example']}")


def _calls(calls: Json, here: str) -> Iterator[Note]:
    if calls["calls"] < LEAST:
        return
    forked = sum(fork["calls"] for fork in calls["forks"])
    if forked > FORKS * calls["calls"]:
        most = calls["forks"][0]
        text = (
            f"{forked} of the last {calls['calls']} calls could not extend an earlier one, most often because of "
            f"{most['reason']}"
        )
        yield Note("bad", text, f"/ui/sessions/{most['example']}")
    if calls["truncated"] > TRUNCATED * calls["calls"]:
        text = f"{calls['truncated']} of the last {calls['calls']} calls ended at their length limit"
        yield Note("warn", text, f"/ui/sessions/{calls['truncated_example']}")
    if calls["failed"] > FAILED * calls["calls"]:
        text = f"{calls['failed']} of the last {calls['calls']} calls have failed: {calls['error']}"
        yield Note("bad", text, f"/ui/sessions/{calls['failed_example']}")


def _samples(flow: Json, here: str) -> Iterator[Note]:
    total = flow["samples"]
    too_old = sum(one["samples"] for one in flow["bands"] if (one["band"], one["reason"]) == ("stale", "too_old"))
    if total >= LEAST and too_old > STALE * total:
        text = (
            f"{too_old / total:.0%} of the samples were too old to train: raise trainer.max_staleness, or lower "
            "rollout.max_concurrent_groups"
        )
        yield Note("warn", text, f"{here}/samples?band=stale&reason=too_old")


def _values(series: Json, name: str) -> list[float]:
    return [value for value in series["metrics"].get(name, []) if value is not None and math.isfinite(value)]


def _recent(series: Json, name: str) -> float | None:
    values = _values(series, name)
    return fmean(values[-RECENT:]) if values else None


def _mismatch_by_engine(series: Json) -> dict[str, float]:
    prefix = "mismatch/engine/"
    names = [name for name in series["metrics"] if name.startswith(prefix) and not name.endswith("/several")]
    return {name.removeprefix(prefix): gap for name in names if (gap := _recent(series, name)) is not None}


def _step_of_largest(series: Json, name: str) -> int:
    values = [
        (value, step) for value, step in zip(series["metrics"][name], series["step"], strict=True) if value is not None
    ]
    return int(max(values[-RECENT:])[1])


def _gain(values: Sequence[float]) -> float | None:
    """How much the last values are above the first; None for too few."""
    return fmean(values[-RECENT:]) - fmean(values[:RECENT]) if len(values) >= 2 * RECENT else None


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values) or 1.0


def _held_out(evaluation: Json) -> tuple[float, float, float] | None:
    """Mean reward, with the lower and the upper end of its interval, of a complete evaluation's first setting."""
    settings = [one for one in evaluation["settings"].values() if one["reward"] is not None]
    return (
        (settings[0]["reward"], settings[0]["low"], settings[0]["high"])
        if settings and evaluation["complete"]
        else None
    )
