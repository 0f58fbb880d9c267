"""Which checkpoints are kept: the newest ones, the best one, and those whose result is not known yet.

newest N (`keep_checkpoints`)          always
best (`keep_best: METRIC`)             by the step's metrics, or by those of the evaluation of its version
waiting                                its evaluation has begun or is due, and may make it the best
held                                   an upload reads it, or no newer one is complete in object storage yet
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from agentrl.configs.trainer_config import EVALUATED, UpdateConfig
from agentrl.errors import StoreError, UserError, did_you_mean
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import Checkpoint

Scores = Callable[[Checkpoint], Mapping[str, float] | None]
"""Metrics of a checkpoint beside those of its step; None while they are not known yet."""


def no_scores(found: Checkpoint) -> Mapping[str, float]:
    """Nothing beside the step's metrics."""
    return {}


def remove_older(
    newest: Checkpoint,
    config: UpdateConfig,
    scores: Scores = no_scores,
    held: Collection[str] = (),
    deleting: Callable[[list[str]], None] = lambda _: None,
) -> None:
    """Delete the checkpoints before `newest`, except the last `keep_checkpoints - 1`, the best by `keep_best`, those
    without a result yet, and those whose names are `held`.

    Gives `deleting` the names of the folders before it deletes them. Raises UserError, before it deletes anything, when
    no checkpoint has that metric.
    """
    root = newest.folder.parent
    limit = checkpoint_folders.order(newest.folder)
    older = [folder for folder in checkpoint_folders.folders(root) if checkpoint_folders.order(folder) < limit]
    kept = set(older[-(config.keep_checkpoints - 1) :])  # at least one
    if config.keep_best is not None:
        best, waiting = best_of([*older, newest.folder], config.keep_best, scores)
        kept |= {*waiting, *([] if best is None else [best])}
    unneeded = [folder for folder in older if folder not in kept and folder.name not in held]
    deleting([folder.name for folder in unneeded])
    for folder in unneeded:
        shutil.rmtree(folder)


def best_of(folders: Sequence[Path], asked: str, scores: Scores = no_scores) -> tuple[Path | None, list[Path]]:
    """The checkpoint with the largest metric `asked`, or with `-METRIC` the smallest, the latest of equal ones; and
    those whose metrics are not known yet. A damaged folder is neither.

    Raises UserError when metrics are known and none of them is `asked`. `folders` are sorted, the oldest first.
    """
    name, sign = asked.removeprefix("-"), -1 if asked.startswith("-") else 1
    best: tuple[float, Path] | None = None
    known: set[str] = set()
    waiting: list[Path] = []
    for folder in folders:
        try:
            found = checkpoint_folders.read(folder)
        except StoreError:
            continue
        more = scores(found)
        if more is None:
            waiting.append(folder)
            continue
        metrics = {**found.record.metrics, **more}
        known |= metrics.keys()
        value = sign * metrics.get(name, -sign * math.inf)
        if value > -math.inf and (best is None or value >= best[0]):
            best = value, folder
    if best is None and name not in known:
        _refuse_unknown(name, known)
    return (None if best is None else best[1]), waiting


def _refuse_unknown(name: str, known: set[str]) -> None:
    """Raise UserError, except for an evaluation's metric while no checkpoint was evaluated."""
    prefix = name.partition("/")[0]
    if prefix in EVALUATED and not any(one.startswith(f"{prefix}/") for one in known):
        return
    raise UserError(f"trainer.keep_best: steps have no metric {name!r}{did_you_mean(name, known)}")
