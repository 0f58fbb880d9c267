"""Durable checkpoints: `checkpoints/step-000012-STEP_ID/`, complete or absent.

    meta.json    what the step was: ids, version, trained trajectories, metrics, and the sizes of the files
    state/       tensors, by torch.distributed.checkpoint: every rank writes and reads its own part, and a run may be
                 resumed on other ranks than it was saved by

Tensors are named PART/NAME: `policy`, its trained parameters, float32, by their Hugging Face names; `policy_optimizer`,
AdamW's moments; `reference`, where the reference policy moves; `critic` and `critic_optimizer`, where there is one; and
`rng`, each rank's random state.

A checkpoint is begun once its step is made. It is waited for before the step is completed in the store, or written
behind the next steps (`Writing`): what it holds was copied first. Either way it holds all that completing its step
needs. The step id in the name keeps an overtaken trainer from replacing what its successor wrote for the same step.
Older ones are deleted only after the step is in the store, and then only those of earlier steps.

At a start, whatever is newer than the checkpoint that is resumed from was damaged, rolled back or made with another
database. It is renamed to `stray-step-…`: it must not outlive new checkpoints as the newest, and may be wanted back.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as save_state_behind
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor

from agentrl.configs.trainer_config import UpdateConfig
from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.errors import StoreError, UserError, did_you_mean
from agentrl.files import draft_of, settle
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Body

FORMAT = 3
STATE = "state"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
Parts = Mapping[str, Mapping[str, Tensor]]
"""Tensors by part and name, as sharded as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What `store.steps.complete` needs to know of a step."""

    step: int
    version: int  # the weights that the step made
    batch: TrainedBatch
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    record: StepRecord


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one, on the CPU. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


@dataclass(frozen=True, slots=True)
class Ignored:
    """A folder that cannot be resumed from."""

    folder: Path
    why: str


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that this rank has begun to write."""

    checkpoint: Checkpoint
    draft: Path
    future: Future[Any] | None  # None: it is written
    leads: bool

    def done(self) -> bool:
        """Whether `finish` does not wait."""
        return self.future is None or self.future.done()

    def finish(self) -> Checkpoint:
        """Wait until every rank has written its part; rank 0 then gives the folder its name.

        Raises StoreError when one could not.
        """
        folder, record = self.checkpoint.folder, self.checkpoint.record
        if self.future is not None:
            try:
                self.future.result()
            except CheckpointException as error:
                raise _not_written(folder, error) from error
        if self.leads:
            files = [path for path in self.draft.rglob("*") if path.is_file()]
            sizes = {str(path.relative_to(self.draft)): path.stat().st_size for path in files}
            meta = {"format": FORMAT, "files": sizes, **asdict(record)}
            (self.draft / "meta.json").write_text(json.dumps(meta))
            settle(self.draft, folder)
        return self.checkpoint


def begin(root: Path, record: StepRecord, parts: Parts, world: World, *, wait: bool) -> Writing:
    """Begin to write a checkpoint; `wait` until all ranks have, or let them go on at once. Collective.

    One that is not waited for must be finished before another is begun. Raises StoreError.
    """
    folder = root / f"step-{record.step:06d}-{record.batch.step_id}"
    draft: Path = world.share(draft_of(folder))
    if world.leads:
        (draft / STATE).mkdir(parents=True)
    state = {f"{part}/{name}": tensor.detach() for part, tensors in parts.items() for name, tensor in tensors.items()}
    state[f"rng/{world.rank}"] = torch.get_rng_state()
    world.barrier()  # the folder is there
    future: Future[Any] | None = None
    writer = FileSystemWriter(draft / STATE)
    try:
        if wait:
            save_state(state, storage_writer=writer, process_group=world.files)
        else:
            response = save_state_behind(state, storage_writer=writer, process_group=world.files)
            future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    except CheckpointException as error:
        raise _not_written(folder, error) from error
    return Writing(Checkpoint(folder, record), draft, future, world.leads)


def _not_written(folder: Path, error: CheckpointException) -> StoreError:
    rank, (reason, _) = next(iter(error.failures.items()))
    return StoreError(f"checkpoint {folder} cannot be written (rank {rank}: {reason})")


def state_of(part: str, model: Body, optimizer: torch.optim.Optimizer) -> Parts:
    """A model's trained parameters and what AdamW knows of them, as parts of a checkpoint."""
    return {part: dict(model.trainable()), f"{part}_optimizer": moments(model, optimizer)}


def moments(model: Body, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state of the trained parameters, as sharded as they are."""
    return {
        f"{name}/{moment}": optimizer.state[p][moment]
        for name, p in model.trainable()
        if p in optimizer.state
        for moment in MOMENTS
    }


# -- finding ----------------------------------------------------------------------------------------------------------


def remove_older(newest: Checkpoint, config: UpdateConfig) -> None:
    """Delete the checkpoints before `newest`, but for the last `keep_checkpoints - 1`, and the best by `keep_best`.

    Raises UserError when no checkpoint's step has that metric, before anything is deleted.
    """
    older = [folder for folder in _folders(newest.folder.parent) if _order(folder) < _order(newest.folder)]
    last = older[-(config.keep_checkpoints - 1) :]  # at least one
    best = None if config.keep_best is None else _best([*older, newest.folder], newest, config.keep_best)
    for folder in older:
        if folder not in last and folder != best:
            shutil.rmtree(folder)


def _best(folders: list[Path], newest: Checkpoint, asked: str) -> Path:
    """The later one, of equal ones."""
    name, sign = asked.removeprefix("-"), -1 if asked.startswith("-") else 1

    def value(folder: Path) -> float:
        try:
            return sign * read(folder).record.metrics.get(name, -sign * math.inf)
        except StoreError:  # damaged: it is no checkpoint to keep
            return -math.inf

    best = max(reversed(folders), key=value)
    if value(best) == -math.inf:
        known = newest.record.metrics
        raise UserError(f"trainer.keep_best: steps have no metric {name!r}{did_you_mean(name, known)}")
    return best


def set_aside(ignored: Ignored) -> Path:
    """Rename a folder so that it no longer counts as a checkpoint; its new path."""
    name, number = f"stray-{ignored.folder.name}", 1
    while (free := ignored.folder.with_name(name if number == 1 else f"{name}.{number}")).exists():
        number += 1
    return ignored.folder.rename(free)


def newest(root: Path, survives: Callable[[str], bool] = lambda _: True) -> tuple[Checkpoint | None, list[Ignored]]:
    """The newest complete checkpoint of a step that `survives(step_id)`, and each newer one with what is wrong."""
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


def read(folder: Path) -> Checkpoint:
    """Check and open a checkpoint. Raises StoreError, which says what is wrong with it."""
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


# -- reading ----------------------------------------------------------------------------------------------------------


def shapes(folder: Path, part: str) -> dict[str, torch.Size]:
    """The tensors of a part; none where the checkpoint was saved without it. Raises StoreError."""
    try:
        known = FileSystemReader(folder / STATE).read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError, AttributeError, ImportError, PickleError) as error:
        raise StoreError(f"{folder / STATE} is damaged: {error!r}") from error
    prefix = f"{part}/"
    return {
        key.removeprefix(prefix): entry.size
        for key, entry in known.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def fill(folder: Path, part: str, targets: Mapping[str, Tensor], world: World) -> None:
    """Read this rank's parts of the targets, which the checkpoint has by these names. Collective.

    Raises StoreError when one has another shape.
    """
    known = shapes(folder, part)
    for name, tensor in targets.items():
        if known[name] != tensor.shape:
            raise StoreError(
                f"{folder}: {part}/{name} has shape {tuple(known[name])}, the model has {tuple(tensor.shape)}"
            )
    state = {f"{part}/{name}": tensor.detach() for name, tensor in targets.items()}
    load_state(state, storage_reader=FileSystemReader(folder / STATE), process_group=world.files)


def load(found: Checkpoint, policy: Body, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Restore weights, moments and random states. Every rank reads its part. Collective.

    Raises StoreError when the checkpoint was made with another model or another `train_layers`.
    """
    restore(found, "policy", policy, optimizer, world)
    size = shapes(found.folder, "rng").get(str(world.rank))  # None on a rank that was not there
    states = {} if size is None else {str(world.rank): torch.empty(size, dtype=torch.uint8)}
    fill(found.folder, "rng", states, world)
    for state in states.values():
        torch.set_rng_state(state)


def restore(found: Checkpoint, part: str, model: Body, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Set a model's trained parameters and AdamW's state of them, `part` and `part_optimizer`. Collective.

    Raises StoreError as `load` does.
    """
    weights, names = dict(model.trainable()), shapes(found.folder, part).keys()
    if names != weights.keys():
        raise StoreError(
            f"checkpoint {found.folder} holds {len(names)} trained tensors, this configuration trains "
            f"{len(weights)}: model, trainer.train_layers or trainer.lora changed"
        )
    fill(found.folder, part, weights, world)
    saved = shapes(found.folder, f"{part}_optimizer")
    for name, p in weights.items():
        if f"{name}/step" in saved:
            first, second = torch.zeros_like(p), torch.zeros_like(p)
            optimizer.state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": first, "exp_avg_sq": second}
    fill(found.folder, f"{part}_optimizer", moments(model, optimizer), world)


def _folders(root: Path) -> list[Path]:
    """Oldest first."""
    return sorted(root.glob("step-*"), key=_order)


def _order(folder: Path) -> tuple[int, str]:
    """By step; leases of one step by their ids, which are time-ordered."""
    match = re.match(r"step-(\d+)", folder.name)
    return (int(match[1]) if match else 0, folder.name)
