"""Compares runs whose engines load a version one by one, each when no call runs on it (`publish.lag`), with runs whose
engines all load it before the run moves on.

    python benchmarks/independent_pulls.py --out benchmarks/results/independent_pulls.json

Whole runs of `agentrl train` in the environment of asynchrony.py (real SGLang, the tiny model, a tool of long-tailed
latency), with two engines. The pair of a seed and a bound runs one after the other, and the next pair in the other
order. With `--ended FILE` the results of ended runs are kept there, and a benchmark that was interrupted goes on after
them.

- `steps_per_hour/S_lagL`: at `max_staleness` S and lag L, between the publishes of the first and the last step.
- `seconds/S_lagL/wait_for_policy`: seconds of a step in which the trainer waits for engines.
- `age/…`, `dropped/…`: mean age of trained tokens in versions; the share of sampled tokens that were too old to train.
- `reward/…`: held-out reward after the last step, mean over the seeds.
- `reward_gap/…`: that reward minus the one of lag 0, seed by seed.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean

import harness
from latency.run import Result, Variant, play

from agentrl.models import resolve_model

BOUNDS = (4, 8)
LAGS = (0, 1)
ENGINES = 2

Key = tuple[int, int, int]
"""Bound, lag, seed."""


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        steps=(int, 30, "optimizer steps of a run"),
        seeds=(int, 3, "seeds"),
        lr=(float, 3e-4, "learning rate"),
        ended=(Path, None, "keep the results of ended runs here, and do not run them again"),
    )
    resolve_model("tiny")
    settings = {"steps": options.steps, "lr": options.lr}
    results = ended(options.ended, settings)
    for seed, bound, lag in order(options.seeds):
        if (bound, lag, seed) in results:
            continue
        variant = Variant(bound, lag=lag, engines=ENGINES)
        with tempfile.TemporaryDirectory(prefix="agentrl-pulls-") as folder:
            found = results[bound, lag, seed] = play(Path(folder), variant, seed, options.steps, options.lr)
        print(
            f"max_staleness {bound} lag {lag} seed {seed}: {found.steps_per_hour:.0f} steps/h, "
            f"reward {found.reward_before:.3f} -> {found.reward_after:.3f}",
            flush=True,
        )
        if options.ended is not None:
            keep(options.ended, settings, results)
    harness.finish(report(results, range(options.seeds), settings), options.out)


def ended(path: Path | None, settings: dict[str, float]) -> dict[Key, Result]:
    """The results in this file. Raises SystemExit when they are of other settings."""
    if path is None or not path.is_file():
        return {}
    found = json.loads(path.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"{path} has runs of {found['settings']}, not of {settings}: name another file in --ended")
    return {tuple(run["key"]): Result(**run["result"]) for run in found["runs"]}


def keep(path: Path, settings: dict[str, float], results: dict[Key, Result]) -> None:
    """Write the results of all runs so far, atomically."""
    runs = [{"key": key, "result": asdict(result)} for key, result in results.items()]
    harness.write_json(path, {"settings": settings, "runs": runs})


def order(seeds: int) -> list[tuple[int, int, int]]:
    """Seed, bound and lag of each run: pairs of lags, forwards and backwards in turn."""
    pairs = enumerate(product(range(seeds), BOUNDS))
    return [(seed, bound, lag) for n, (seed, bound) in pairs for lag in (LAGS[::-1] if n % 2 else LAGS)]


def report(results: dict[Key, Result], seeds: range, settings: dict[str, float]) -> harness.Report:
    """The figures of all runs."""
    made = harness.Report("independent_pulls")
    made.notes |= {"engines": ENGINES, "seeds": len(seeds), **settings}
    for bound in BOUNDS:
        runs = {f"{bound}_lag{lag}": [results[bound, lag, seed] for seed in seeds] for lag in LAGS}
        base = f"{bound}_lag0"
        made.compare("steps_per_hour", {name: [r.steps_per_hour for r in of] for name, of in runs.items()}, "1/h", base)
        for name, of in runs.items():
            made.add(f"seconds/{name}/wait_for_policy", [r.seconds["wait_for_policy"] for r in of], "s")
            made.add(f"age/{name}", [r.metrics["off_policy/mean"] for r in of], "versions")
            made.add(f"dropped/{name}", [r.metrics["off_policy/dropped_share"] for r in of], "of the sampled tokens")
            made.add(f"reward/{name}", [r.reward_after for r in of], "reward", statistic=fmean)
            gaps = [r.reward_after - same.reward_after for r, same in zip(of, runs[base], strict=True)]
            made.add(f"reward_gap/{name}", gaps, "reward", statistic=fmean)
    return made


if __name__ == "__main__":
    main()
