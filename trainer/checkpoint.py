"""Durable checkpoints: `checkpoints/step-000012-STEP_ID/`, complete or absent.

    meta.json               what the step was: ids, version, trained trajectories, metrics, and the sizes of the files
    weights.safetensors     trained parameters, float32, Hugging Face names
    optimizer.safetensors   AdamW's moments
    reference.safetensors   where the reference policy moves: its tensors that are not the base model's
    critic.safetensors      where there is a critic: its trained parameters, float32, and critic_optimizer.safetensors
    rng.pt                  random states of every rank

A checkpoint is written before its step is completed in the store, and holds all that completing it needs. The step id
in the name keeps an overtaken trainer from replacing what its successor wrote for the same step. Older ones are deleted
only after the step is in the store, and then only those of earlier steps.

At a start, whatever is newer than the checkpoint that is resumed from was damaged, rolled back or made with another
database. It is renamed to `stray-step-…`: it must not outlive new checkpoints as the newest, and may be wanted back.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import StoreError
from agentrl.files import atomic_folder
from agentrl.schemas import TrainedBatch, TrainedTrajectory
from agentrl.trainer.distributed import World
from agentrl.trainer.loading import owned
from agentrl.trainer.policy import Body

FORMAT = 2
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


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

    @property
    def weights(self) -> Path:
        """The trained parameters."""
        return self.folder / "weights.safetensors"


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one, on the CPU. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


@dataclass(frozen=True, slots=True)
class Ignored:
    """A folder that cannot be resumed from."""

    folder: Path
    why: str


def moments(model: Body, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state of the trained parameters, as sharded as they are."""
    return {
        f"{name}/{moment}": optimizer.state[p][moment]
        for name, p in model.trainable()
        if p in optimizer.state
        for moment in MOMENTS
    }


def save(
    root: Path, record: StepRecord, policy: Body, optimizer: torch.optim.Optimizer, world: World,
    parts: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Checkpoint:  # fmt: skip
    """Write a checkpoint, each of `parts` (name → tensors) as one more file. Collective; rank 0 writes."""
    named: dict[str, Mapping[str, Tensor]] = {
        "weights": dict(policy.trainable()), "optimizer": moments(policy, optimizer), **(parts or {}),
    }  # fmt: skip
    whole = {file: {name: full(t) for name, t in tensors.items()} for file, tensors in named.items()}
    states: list[Tensor | None] = [None] * world.size
    dist.all_gather_object(states, torch.get_rng_state())
    folder = root / f"step-{record.step:06d}-{record.batch.step_id}"
    if world.leads:
        with atomic_folder(folder) as draft:
            for file, tensors in whole.items():
                save_file(tensors, draft / f"{file}.safetensors")
            torch.save(states, draft / "rng.pt")
            sizes = {path.name: path.stat().st_size for path in draft.iterdir()}
            meta = {"format": FORMAT, "files": sizes, **asdict(record)}
            (draft / "meta.json").write_text(json.dumps(meta))
    dist.barrier()
    return Checkpoint(folder, record)


def remove_older(newest: Path, keep: int) -> None:
    """Delete the checkpoints before `newest`, but for the last `keep - 1` of them."""
    older = [folder for folder in _folders(newest.parent) if _order(folder) < _order(newest)]
    for folder in older[: max(0, len(older) - (keep - 1))]:
        shutil.rmtree(folder)


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
        if path.suffix == ".safetensors":
            _check_header(path)
    return Checkpoint(folder, record)


def _check_header(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise StoreError(f"{path.name} is damaged: {error}") from error


def load(checkpoint: Checkpoint, policy: Body, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Restore weights, moments and random states. Every rank reads its part.

    Raises StoreError when the checkpoint was made with another model or another `train_layers`.
    """
    weights = load_file(checkpoint.weights)
    names = {name for name, _ in policy.trainable()}
    if set(weights) != names:
        raise StoreError(
            f"checkpoint {checkpoint.folder} holds {len(weights)} trained tensors, this configuration trains "
            f"{len(names)}: model, trainer.train_layers or trainer.lora changed"
        )
    restore(policy, optimizer, weights, load_file(checkpoint.folder / "optimizer.safetensors"), checkpoint.folder)
    states = torch.load(checkpoint.folder / "rng.pt", weights_only=True)
    if world.rank < len(states):
        torch.set_rng_state(states[world.rank])


def part(checkpoint: Checkpoint, name: str) -> dict[str, Tensor] | None:
    """The whole tensors of one of the `parts` that it was saved with; None when it was saved without it."""
    path = checkpoint.folder / f"{name}.safetensors"
    return load_file(path) if path.is_file() else None


def restore(
    model: Body, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor],
    what: Path,
) -> None:  # fmt: skip
    """Set the trained parameters and AdamW's state of them from whole tensors."""
    for name, p in model.trainable():
        with torch.no_grad():
            p.copy_(like(weights[name], p, what / name))
        if f"{name}/step" in moments:
            optimizer.state[p] = {
                "step": moments[f"{name}/step"],
                "exp_avg": like(moments[f"{name}/exp_avg"], p, what / name),
                "exp_avg_sq": like(moments[f"{name}/exp_avg_sq"], p, what / name),
            }


def like(tensor: Tensor, parameter: Tensor, what: object) -> Tensor:
    """`tensor`, sharded and placed as `parameter` is. Raises StoreError when it has another shape."""
    if tensor.shape != parameter.shape:
        raise StoreError(f"{what} has shape {tuple(tensor.shape)}, the model has {tuple(parameter.shape)}")
    made = torch.empty_like(parameter, requires_grad=False)
    local, rows = owned(made)
    local.copy_(tensor[rows])
    return made


def _folders(root: Path) -> list[Path]:
    """Oldest first."""
    return sorted(root.glob("step-*"), key=_order)


def _order(folder: Path) -> tuple[int, str]:
    """By step; leases of one step by their ids, which are time-ordered."""
    match = re.match(r"step-(\d+)", folder.name)
    return (int(match[1]) if match else 0, folder.name)
