"""Measures the speed and the reward of each `trainer.max_staleness`, with tools of long-tailed latency.

    python benchmarks/asynchrony.py --out benchmarks/results/asynchrony.json
    python benchmarks/asynchrony.py --steps 10 --seeds 1

Whole runs of `agentrl train`: real SGLang, the tiny model, and an agent that calls the model, waits for a tool, and
calls it again. The tool's duration is lognormal (median 2 s, σ 1.2), from a seed. All variants train the same number of
steps of 16 groups of 4 sessions; admission limits the groups in flight. The seeds of `max_staleness` 0 run first, all
at once, because they mostly wait. Then every other bound runs alone, for its speed. Their other seeds and the runs
without correction follow, a few at once, for their reward only.

- `steps_per_hour/S`: at `max_staleness` S, between the publishes of the first and the last step.
- `seconds/S/PART`: the seconds of a step by part: `wait_for_batch` (agents), `wait_for_policy` (engines take weights),
  `train`, `checkpoint` (and the engines' folder), `rest`.
- `age/S`, `dropped/S`: mean age of trained tokens in versions; the share of sampled tokens that were too old to train.
- `reward/VARIANT`: held-out reward after the last step, mean over the seeds (64 tasks, 4 samples each).
  `S_uncorrected`: with `algorithm.correction: none`, so the age of a token has no effect. `reward/before`: of the base
  weights.
- `reward_gap/VARIANT`: this reward minus the one at `max_staleness` 0 with the same seed, mean over the seeds.
- `weights_ess/VARIANT`: effective sample size of the importance ratios, as a share of the tokens.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import harness
from latency.run import GROUP_SIZE, GROUPS_PER_STEP, MEDIAN_S, SIGMA, Result, Variant, play

from agentrl.models import resolve_model

BOUNDS = (0, 1, 2, 4, 8)
SYNCHRONOUS = Variant(0)
LEARNED = (SYNCHRONOUS, Variant(4), Variant(4, corrected=False), Variant(8), Variant(8, corrected=False))
AT_ONCE = 3

Key = tuple[Variant, int]


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        steps=(int, 30, "optimizer steps of a run"),
        seeds=(int, 3, "seeds for the rewards"),
        lr=(float, 3e-4, "learning rate"),
    )
    resolve_model("tiny")
    seeds = range(options.seeds)
    run = partial(measure, steps=options.steps, lr=options.lr)
    results: dict[Key, Result] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results |= zip(waiting := [(SYNCHRONOUS, seed) for seed in seeds], pool.map(run, waiting), strict=True)
        for bound in BOUNDS[1:]:
            results[Variant(bound), 0] = run((Variant(bound), 0))
        left = [key for key in product(LEARNED, seeds) if key not in results]
        results |= zip(left, pool.map(run, left), strict=True)
    harness.finish(report(results, seeds), options.out)


def measure(key: Key, *, steps: int, lr: float) -> Result:
    """Run one variant with one seed, and print a line about it."""
    variant, seed = key
    with tempfile.TemporaryDirectory(prefix="agentrl-asynchrony-") as folder:
        result = play(Path(folder), variant, seed, steps, lr)
    print(
        f"max_staleness {variant.name:<14} seed {seed}: {result.steps_per_hour:6.0f} steps/h, "
        f"reward {result.reward_before:.3f} -> {result.reward_after:.3f}",
        flush=True,
    )
    return result


def report(results: dict[Key, Result], seeds: range) -> harness.Report:
    """The figures of all runs."""
    timed = {bound: [results[Variant(bound), seed] for seed in (seeds if bound == 0 else [0])] for bound in BOUNDS}
    made = harness.Report("asynchrony")
    made.notes |= {"groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "median_s": MEDIAN_S, "sigma": SIGMA}
    made.compare(
        "steps_per_hour", {f"{b}": [r.steps_per_hour for r in found] for b, found in timed.items()}, "1/h", "0"
    )
    for bound, found in timed.items():
        for part in found[0].seconds:
            made.add(f"seconds/{bound}/{part}", [r.seconds[part] for r in found], "s")
        made.add(f"age/{bound}", [r.metrics["off_policy/mean"] for r in found], "versions")
        made.add(f"dropped/{bound}", [r.metrics["off_policy/dropped_share"] for r in found], "of the sampled tokens")
    befores = [results[SYNCHRONOUS, seed].reward_before for seed in seeds]
    made.add("reward/before", befores, "reward", statistic=fmean)
    for variant in LEARNED:
        made.add(
            f"reward/{variant.name}", [results[variant, seed].reward_after for seed in seeds], "reward", statistic=fmean
        )
    for variant in LEARNED[1:]:
        gaps = [results[variant, s].reward_after - results[SYNCHRONOUS, s].reward_after for s in seeds]
        made.add(f"reward_gap/{variant.name}", gaps, "reward", statistic=fmean)
    for variant in LEARNED:
        shares = [results[variant, seed].metrics["importance_ratio/ess"] for seed in seeds]
        made.add(f"weights_ess/{variant.name}", shares, "share", statistic=fmean)
    return made


if __name__ == "__main__":
    main()
