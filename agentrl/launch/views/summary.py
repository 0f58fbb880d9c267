"""Builds `summary.json`, the statistics of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.domain.evaluation import Evaluation, gains
from agentrl.domain.schemas import Json
from agentrl.launch.views.snapshot import Snapshot


def summarize(snapshot: Snapshot, main_setting: str, wall_s: float, output_tokens: int) -> Json:
    """The content of `summary.json`. Rewards are means over the evaluation's tasks; null without an evaluation."""
    points = snapshot.points
    matched = [
        (p.metrics["logprob_mismatch_mean_abs"], p.metrics["mismatch_tokens"])
        for p in points
        if p.metrics.get("mismatch_tokens")
    ]
    matched_tokens = sum(tokens for _, tokens in matched)
    before, after = ends(snapshot.evaluations)
    return {
        "steps": snapshot.published_step,
        "wall_s": round(wall_s, 1),
        "eval_before": _reward(before, main_setting),
        "eval_after": _reward(after, main_setting),
        "gains": gains(before, after) if before and after else {},
        "evaluations": [evaluation.as_json() for evaluation in snapshot.evaluations],
        "trajectories_trained": sum(p.trajectories for p in points),
        "tokens_trained": sum(p.tokens_trained for p in points),
        "max_staleness_seen": max((p.staleness_max for p in points), default=0),
        "logprob_mismatch_mean_abs": sum(m * t for m, t in matched) / matched_tokens if matched else None,
        "mismatch_tokens": int(matched_tokens),
        "rewards": [p.reward for p in points],
        "output_tokens": output_tokens,
    }


def write(summary: Json, path: Path) -> None:
    """Write the file atomically."""
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(staging, path)


def ends(evaluations: Sequence[Evaluation]) -> tuple[Evaluation | None, Evaluation | None]:
    """The complete evaluations before the first step and after the newest step."""
    complete = [evaluation for evaluation in evaluations if evaluation.complete]
    before = next((evaluation for evaluation in complete if evaluation.step == 0), None)
    after = next((evaluation for evaluation in reversed(complete) if evaluation.step > 0), None)
    return before, after


def _reward(evaluation: Evaluation | None, setting: str) -> float | None:
    if evaluation is None or setting not in evaluation.settings:
        return None
    mean = evaluation.settings[setting].as_json()["reward"]
    return None if mean is None else float(mean)
