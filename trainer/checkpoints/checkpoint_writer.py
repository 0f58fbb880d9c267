"""Writes checkpoints: every rank's thread writes and hashes its own tensors, then rank 0's renames the draft folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from agentrl.errors import StoreError
from agentrl.files import draft_of, settle
from agentrl.trainer.checkpoints.checkpoint import FORMAT, META, STATE, Checkpoint, Parts, StepRecord
from agentrl.trainer.checkpoints.hashed_files import HashingWriter
from agentrl.trainer.distributed import World
from agentrl.trainer.optimizer import Trainable, moments


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that a thread writes."""

    folder: Path
    record: StepRecord
    future: Future[Checkpoint]
    rank: int
    began: float  # seconds since the epoch

    def done(self) -> bool:
        """Whether `finish` returns without waiting."""
        return self.future.done()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call when the checkpoint is complete, or cannot be written, in any thread."""
        self.future.add_done_callback(lambda _: call())

    def finish(self) -> Checkpoint:
        """Wait until every rank has written its part, and on rank 0 until the folder is complete.

        Raises StoreError when a rank could not write; it names the rank and the folder.
        """
        try:
            return self.future.result()
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise unwritable(self.folder, rank, reason) from error
        except OSError as error:
            raise unwritable(self.folder, self.rank, error) from error


def unwritable(folder: Path, rank: int, reason: BaseException) -> StoreError:
    """The error of a checkpoint that a rank could not write."""
    return StoreError(f"checkpoint {folder} cannot be written (rank {rank}: {reason})")


def begin(root: Path, record: StepRecord, parts: Parts, world: World, *, copied: bool) -> Writing:
    """Begin to write a checkpoint in a thread. Collective. Raises StoreError.

    With `copied` from a copy of the tensors in the CPU's memory, so that the next steps may change them. Otherwise they
    must not change until the checkpoint is finished. One checkpoint must be finished before the next is begun.
    """
    began = time.time()
    folder = root / f"step-{record.step:06d}-{record.batch.step_id}"
    draft: Path = world.share(draft_of(folder))
    if world.leads:
        try:
            (draft / STATE).mkdir(parents=True)
        except OSError as error:
            raise unwritable(folder, world.rank, error) from error
    state = {f"{part}/{name}": tensor.detach() for part, tensors in parts.items() for name, tensor in tensors.items()}
    state[f"rng/{world.rank}"] = torch.get_rng_state()
    world.barrier()  # until the folder exists
    writer = HashingWriter(draft / STATE)
    if copied:
        state = writer.stage(state)
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = thread.submit(partial(_write, draft, Checkpoint(folder, record, "", 0), state, writer, world))
    thread.shutdown(wait=False)
    return Writing(folder, record, future, world.rank, began)


def _write(
    draft: Path, made: Checkpoint, state: Mapping[str, Tensor], writer: HashingWriter, world: World
) -> Checkpoint:
    """Write this rank's part; rank 0 then completes the folder. Collective. Raises CheckpointException and OSError."""
    with torch.cuda.device(world.device) if world.device.type == "cuda" else nullcontext():
        save_state(dict(state), storage_writer=writer, process_group=world.files)
    if not world.leads:
        return made
    files = [path for path in draft.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(draft)): path.stat().st_size for path in files}
    sha256 = {f"{STATE}/{name}": digest for name, digest in writer.sha256.items()}
    meta = json.dumps({"format": FORMAT, "files": sizes, "sha256": sha256, **asdict(made.record)}).encode()
    (draft / META).write_bytes(meta)
    settle(draft, made.folder)
    digest, size_bytes = hashlib.sha256(meta).hexdigest(), sum(sizes.values()) + len(meta)
    return replace(made, digest=digest, size_bytes=size_bytes, written_at=time.time())


def state_of(part: str, model: Trainable, optimizer: torch.optim.Optimizer) -> Parts:
    """A model's trained parameters and their AdamW moments, as parts of a checkpoint."""
    return {part: dict(model.trainable()), f"{part}_optimizer": moments(model, optimizer)}
