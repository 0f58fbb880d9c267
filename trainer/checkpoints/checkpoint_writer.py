"""Writes checkpoints: every rank writes its own tensors, then rank 0 renames the draft folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as save_state_behind
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from agentrl.errors import StoreError
from agentrl.files import draft_of, settle
from agentrl.trainer.checkpoints.checkpoint import FORMAT, STATE, Checkpoint, Parts, StepRecord
from agentrl.trainer.distributed import World
from agentrl.trainer.optimizer import Trainable, moments


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that is being written."""

    checkpoint: Checkpoint
    draft: Path
    future: Future[Any] | None  # None: the tensors are written
    leads: bool

    def done(self) -> bool:
        """Whether `finish` returns without waiting."""
        return self.future is None or self.future.done()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call when this rank's part is written, in any thread."""
        if self.future is None:
            call()
        else:
            self.future.add_done_callback(lambda _: call())

    def finish(self) -> Checkpoint:
        """Wait until every rank has written its part. Rank 0 then gives the folder its name.

        Raises StoreError when a rank could not write.
        """
        folder, record = self.checkpoint.folder, self.checkpoint.record
        if self.future is not None:
            try:
                self.future.result()
            except CheckpointException as error:
                raise _write_error(folder, error) from error
        if self.leads:
            files = [path for path in self.draft.rglob("*") if path.is_file()]
            sizes = {str(path.relative_to(self.draft)): path.stat().st_size for path in files}
            meta = {"format": FORMAT, "files": sizes, **asdict(record)}
            (self.draft / "meta.json").write_text(json.dumps(meta))
            settle(self.draft, folder)
        return self.checkpoint


def begin(root: Path, record: StepRecord, parts: Parts, world: World, *, wait: bool) -> Writing:
    """Begin to write a checkpoint. Collective. Raises StoreError.

    With `wait`, returns when all ranks have written. Without, ranks go on at once, and the checkpoint must be finished
    before the next one is begun.
    """
    folder = root / f"step-{record.step:06d}-{record.batch.step_id}"
    draft: Path = world.share(draft_of(folder))
    if world.leads:
        (draft / STATE).mkdir(parents=True)
    state = {f"{part}/{name}": tensor.detach() for part, tensors in parts.items() for name, tensor in tensors.items()}
    state[f"rng/{world.rank}"] = torch.get_rng_state()
    world.barrier()  # until the folder exists
    future: Future[Any] | None = None
    writer = FileSystemWriter(draft / STATE)
    try:
        if wait:
            save_state(state, storage_writer=writer, process_group=world.files)
        else:
            response = save_state_behind(state, storage_writer=writer, process_group=world.files)
            future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    except CheckpointException as error:
        raise _write_error(folder, error) from error
    return Writing(Checkpoint(folder, record), draft, future, world.leads)


def _write_error(folder: Path, error: CheckpointException) -> StoreError:
    rank, (reason, _) = next(iter(error.failures.items()))
    return StoreError(f"checkpoint {folder} cannot be written (rank {rank}: {reason})")


def state_of(part: str, model: Trainable, optimizer: torch.optim.Optimizer) -> Parts:
    """A model's trained parameters and their AdamW moments, as parts of a checkpoint."""
    return {part: dict(model.trainable()), f"{part}_optimizer": moments(model, optimizer)}
