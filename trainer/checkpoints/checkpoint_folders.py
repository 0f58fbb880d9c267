"""Finds, checks, sets aside and deletes checkpoint folders."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from agentrl.configs.trainer_config import UpdateConfig
from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.errors import StoreError, UserError, did_you_mean
from agentrl.trainer.checkpoints.checkpoint import FORMAT, Checkpoint, Ignored, StepRecord


def remove_older(newest: Checkpoint, config: UpdateConfig) -> list[str]:
    """Delete the checkpoints before `newest`, except the last `keep_checkpoints - 1` and the best by `keep_best`.

    Returns the names of the deleted folders. Raises UserError, before it deletes anything, when no checkpoint's step
    has that metric.
    """
    older = [folder for folder in _folders(newest.folder.parent) if _order(folder) < _order(newest.folder)]
    last = older[-(config.keep_checkpoints - 1) :]  # at least one
    best = None if config.keep_best is None else _best([*older, newest.folder], newest, config.keep_best)
    unneeded = [folder for folder in older if folder not in last and folder != best]
    for folder in unneeded:
        shutil.rmtree(folder)
    return [folder.name for folder in unneeded]


def _best(folders: list[Path], newest: Checkpoint, asked: str) -> Path:
    """The checkpoint with the highest `asked` metric, or with `-METRIC` the lowest; the latest of equal ones."""
    name, sign = asked.removeprefix("-"), -1 if asked.startswith("-") else 1

    def value(folder: Path) -> float:
        try:
            return sign * read(folder).record.metrics.get(name, -sign * math.inf)
        except StoreError:  # damaged, so not worth keeping
            return -math.inf

    best = max(reversed(folders), key=value)
    if value(best) == -math.inf:
        known = newest.record.metrics
        raise UserError(f"trainer.keep_best: steps have no metric {name!r}{did_you_mean(name, known)}")
    return best


def set_aside(ignored: Ignored) -> Path:
    """Rename a folder so that it no longer counts as a checkpoint. Returns its new path."""
    name, number = f"stray-{ignored.folder.name}", 1
    while (free := ignored.folder.with_name(name if number == 1 else f"{name}.{number}")).exists():
        number += 1
    return ignored.folder.rename(free)


def newest(root: Path, survives: Callable[[str], bool] = lambda _: True) -> tuple[Checkpoint | None, list[Ignored]]:
    """The newest complete checkpoint of a step that `survives(step_id)`, and each newer folder with its fault."""
    ignored: list[Ignored] = []
    for folder in reversed(_folders(root)):
        try:
            found = read(folder)
            if survives(found.record.batch.step_id):
                return found, ignored
            ignored.append(Ignored(folder, "its step was rolled back, or is not in this database"))
        except StoreError as error:
            ignored.append(Ignored(folder, str(error)))
    return None, ignored


def newer(names: Iterable[str], than: Checkpoint | None) -> list[tuple[str, str]]:
    """Those of `names` that are newer checkpoints than one, the newest first, each with its step id."""
    found = [(name, match[1]) for name in names if (match := re.fullmatch(r"step-\d+-(\w+)", name))]
    limit = (0, "") if than is None else _order(than.folder)
    return sorted((one for one in found if _order(Path(one[0])) > limit), key=lambda one: _order(Path(one[0])))[::-1]


def read(folder: Path) -> Checkpoint:
    """Check and open a checkpoint. Raises StoreError that says what is wrong with it."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = meta["files"]
        record = StepRecord(
            step=meta["step"],
            version=meta["version"],
            batch=TrainedBatch(
                **meta["batch"] | {"trained": [TrainedTrajectory(**t) for t in meta["batch"]["trained"]]}
            ),
            metrics=meta["metrics"],
        )
    except OSError as error:
        raise StoreError(f"meta.json cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"meta.json is damaged: {error!r}") from error
    if meta.get("format") != FORMAT:
        raise StoreError(f"format {meta.get('format')} is not {FORMAT}")
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise StoreError(f"{name} is missing or truncated")
    return Checkpoint(folder, record)


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(root.glob("step-*"), key=_order)


def _order(folder: Path) -> tuple[int, str]:
    """Sorts by step, and checkpoints of one step by step id, which grows with time."""
    match = re.match(r"step-(\d+)", folder.name)
    return (int(match[1]) if match else 0, folder.name)
