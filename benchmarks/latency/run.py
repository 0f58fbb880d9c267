"""One run of `agentrl train` in the environment, from its configuration to its results in store and summary."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from whole_runs import agentrl

NAME = "asynchrony"
GROUPS_PER_STEP, GROUP_SIZE = 16, 4
MEDIAN_S, SIGMA = 2.0, 1.2
PARTS = ("wait_for_batch", "wait_for_policy", "train", "checkpoint")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the comparison: how old tokens may be, whether the loss corrects for their age, how many versions an
    engine may be behind the run (`publish.lag`), and how many engines there are.
    """

    max_staleness: int
    corrected: bool = True
    lag: int = 0
    engines: int = 1

    @property
    def name(self) -> str:
        """The name of the variant in figures."""
        return f"{self.max_staleness}{'' if self.corrected else '_uncorrected'}{f'_lag{self.lag}' if self.lag else ''}"


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one run. `seconds`: of a step, by part; `metrics`: means over the steps after the first."""

    steps_per_hour: float
    reward_before: float
    reward_after: float
    seconds: dict[str, float]
    metrics: dict[str, float]


def play(folder: Path, variant: Variant, seed: int, steps: int, lr: float) -> Result:
    """Run `agentrl train` to its end in an empty folder. Raises SystemExit with the end of its log when it fails."""
    shutil.copyfile(Path(__file__).with_name("agent.py"), folder / "slow_tool.py")
    (folder / "config.yaml").write_text(yaml.safe_dump(config(variant, seed, steps, lr)))
    agentrl(folder, folder / "train.log", "train", "config.yaml", modules=folder)
    return result(folder / "runs" / NAME)


def config(variant: Variant, seed: int, steps: int, lr: float) -> dict[str, Any]:
    """All variants have the same steps, batches and tasks; only the trainer's bound and its correction differ."""
    in_flight = GROUPS_PER_STEP * (variant.max_staleness + 1)
    return {
        "name": NAME,
        "model": "tiny",
        "agent": "slow_tool:SlowToolAgent",
        "agent_args": {"seed": seed, "median_s": MEDIAN_S, "sigma": SIGMA},
        "tasks": "agentrl.agents.reverse:train_tasks",
        "steps": steps,
        "seed": seed,
        "rollout": {"group_size": GROUP_SIZE, "max_concurrent_groups": in_flight, "timeout_s": 900},
        "trainer": {
            "groups_per_step": GROUPS_PER_STEP,
            "max_staleness": variant.max_staleness,
            "lr": lr,
            "algorithm": {"aggregation": "token_mean"} | ({} if variant.corrected else {"correction": "none"}),
        },
        "publish": {"lag": variant.lag},
        "resources": {"engines": {"count": variant.engines}},
        "evaluation": {
            "tasks": "agentrl.agents.reverse:heldout_tasks",
            "size": 64,
            "samples": 4,
            "settings": {"sampled": {"temperature": 1.0}},
        },
    }


def result(run_dir: Path) -> Result:
    """Read a finished run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    with closing(sqlite3.connect(run_dir / "agentrl.db")) as conn:
        rows = conn.execute(
            "SELECT published_at, metrics FROM steps WHERE state = 'published' ORDER BY step"
        ).fetchall()
    published = [at for at, _ in rows]
    metrics = [json.loads(text) for _, text in rows[1:]]
    step_s = (published[-1] - published[0]) / len(metrics)
    seconds = {part: fmean(m[f"time/{part}"] for m in metrics) for part in PARTS}
    for m in metrics:
        m["off_policy/dropped_share"] = m["off_policy/dropped"] / (m["off_policy/dropped"] + m["tokens_trained"])
    names = ("off_policy/mean", "off_policy/dropped_share", "importance_ratio/ess")
    return Result(
        steps_per_hour=3600 / step_s,
        reward_before=summary["eval_before"],
        reward_after=summary["eval_after"],
        seconds={**seconds, "rest": step_s - sum(seconds.values()), "step": step_s},
        metrics={name: fmean(m[name] for m in metrics) for name in names},
    )
