"""`summary.json`: the run in figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import fmean

from agentrl.launch.snapshot import Snapshot
from agentrl.schemas import Json

MAIN_SETTING = "sampled"


def summarize(snapshot: Snapshot, wall_s: float, output_tokens: int) -> Json:
    """What `summary.json` holds. Rewards are means over the evaluation's tasks; null where nothing was evaluated."""
    points = snapshot.points
    matched = [
        (p.metrics["logprob_mismatch_mean_abs"], p.metrics["mismatch_tokens"])
        for p in points
        if p.metrics.get("mismatch_tokens")
    ]
    matched_tokens = sum(tokens for _, tokens in matched)
    evaluations = {
        when: {
            setting: {"reward": fmean(values), "perfect": fmean(v >= 1.0 for v in values), "tasks": len(values)}
            for (phase, setting), values in sorted(snapshot.evaluations.items())
            if phase == when
        }
        for when in ("before", "after")
    }
    return {
        "steps": snapshot.published_step,
        "wall_s": round(wall_s, 1),
        "eval_before": evaluations["before"].get(MAIN_SETTING, {}).get("reward"),
        "eval_after": evaluations["after"].get(MAIN_SETTING, {}).get("reward"),
        "evaluations": evaluations,
        "trajectories_trained": sum(p.trajectories for p in points),
        "tokens_trained": sum(p.tokens_trained for p in points),
        "max_staleness_seen": max((p.staleness_max for p in points), default=0),
        "logprob_mismatch_mean_abs": sum(m * t for m, t in matched) / matched_tokens if matched else None,
        "mismatch_tokens": int(matched_tokens),
        "rewards": [p.reward for p in points],
        "output_tokens": output_tokens,
    }


def write(summary: Json, path: Path) -> None:
    """Write it whole or not at all."""
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(staging, path)


def marks(summary: Json) -> dict[str, tuple[float | None, float | None]]:
    """Evaluation setting → mean reward before and after."""
    before, after = summary["evaluations"]["before"], summary["evaluations"]["after"]
    return {
        name: (before.get(name, {}).get("reward"), after.get(name, {}).get("reward"))
        for name in sorted(before.keys() | after.keys())
    }
