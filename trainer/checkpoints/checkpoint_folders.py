"""Finds, checks and sets aside checkpoint folders."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.errors import StoreError
from agentrl.storage.folder_manifest import facts_of
from agentrl.trainer.checkpoints.checkpoint import FORMAT, META, Checkpoint, Ignored, StepRecord

Check = Callable[[Checkpoint], None]
"""Raises StoreError for a checkpoint that cannot be used, with the reason."""


def set_aside(ignored: Ignored) -> Path:
    """Rename a folder so that it no longer counts as a checkpoint. Returns its new path."""
    name, number = f"stray-{ignored.folder.name}", 1
    while (free := ignored.folder.with_name(name if number == 1 else f"{name}.{number}")).exists():
        number += 1
    return ignored.folder.rename(free)


def newest(
    root: Path, survives: Callable[[str], bool] = lambda _: True, check: Check = lambda _: None
) -> tuple[Checkpoint | None, list[Ignored]]:
    """The newest complete checkpoint of a step that `survives(step_id)` and that passes `check`; each newer folder with
    its fault.
    """
    ignored: list[Ignored] = []
    for folder in reversed(folders(root)):
        try:
            found = read(folder)
            if survives(found.record.batch.step_id):
                check(found)
                return found, ignored
            ignored.append(Ignored(folder, "its step was rolled back, or is not in this database"))
        except StoreError as error:
            ignored.append(Ignored(folder, str(error)))
    return None, ignored


def newer(names: Iterable[str], than: Checkpoint | None) -> list[tuple[str, str]]:
    """Those of `names` that are newer checkpoints than one, the newest first, each with its step id."""
    found = [(name, match[1]) for name in names if (match := re.fullmatch(r"step-\d+-(\w+)", name))]
    limit = (0, "") if than is None else order(than.folder)
    return sorted((one for one in found if order(Path(one[0])) > limit), key=lambda one: order(Path(one[0])))[::-1]


def read(folder: Path) -> Checkpoint:
    """Open a checkpoint, and check that its files have their sizes. Raises StoreError that says what is wrong."""
    data, meta = _meta(folder)
    try:
        sizes = dict(meta["files"])
        record = StepRecord(
            step=meta["step"],
            version=meta["version"],
            batch=TrainedBatch(
                **meta["batch"] | {"trained": [TrainedTrajectory(**t) for t in meta["batch"]["trained"]]}
            ),
            metrics=meta["metrics"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{META} is damaged: {error!r}") from error
    if meta.get("format") != FORMAT:
        raise StoreError(f"format {meta.get('format')} is not {FORMAT}")
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise StoreError(f"{name} is missing or truncated")
    return Checkpoint(folder, record, hashlib.sha256(data).hexdigest(), sum(sizes.values()) + len(data))


def verify(found: Checkpoint) -> None:
    """Compare the bytes of a checkpoint's files with their SHA-256 in its meta.json. Raises StoreError."""
    _, meta = _meta(found.folder)

    def fault(item: tuple[str, str]) -> str | None:
        name, sha256 = item
        return None if facts_of(found.folder / name).sha256 == sha256 else f"{name} has changed since it was written"

    with ThreadPoolExecutor() as threads:
        try:
            faults = [said for said in threads.map(fault, meta.get("sha256", {}).items()) if said is not None]
        except OSError as error:
            raise StoreError(f"{error.filename} cannot be read: {error.strerror}") from error
    if faults:
        raise StoreError("; ".join(faults))


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(root.glob("step-*"), key=order)


def order(folder: Path) -> tuple[int, str]:
    """Sorts by step, and checkpoints of one step by step id, which grows with time."""
    match = re.match(r"step-(\d+)", folder.name)
    return (int(match[1]) if match else 0, folder.name)


def _meta(folder: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        data = (folder / META).read_bytes()
        meta = json.loads(data)
    except OSError as error:
        raise StoreError(f"{META} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{META} is damaged: {error!r}") from error
    if not isinstance(meta, dict):
        raise StoreError(f"{META} is damaged: it is not an object")
    return data, meta
