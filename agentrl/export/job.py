"""Runs one export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import StepState
from agentrl.domain.selection import Selection
from agentrl.errors import UserError
from agentrl.export import areal_dump, tensors
from agentrl.export.output import atomic_file, atomic_folder, require_free
from agentrl.export.row_writers import WRITERS
from agentrl.store import Database, Row
from agentrl.store.exports import evaluation_paths, row_pages
from agentrl.store.exports.columns import COLUMNS
from agentrl.store.training import steps

FORMATS = ("parquet", "jsonl", "areal", "tensors")
Progress = Callable[[int, int], None]
"""Called with (rows done, total rows)."""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of an export."""

    path: Path
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to export from a run, and where to. `tokenizer` is a model folder for text; default: the run's model."""

    database: Database
    run: Row[Any]
    selection: Selection
    format: str
    out: Path
    force: bool = False
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if self.format in ("areal", "tensors") and self.selection.what != "trajectories":
            raise UserError(f"--format {self.format} supports trajectories, not {self.selection.what}")

    def execute(self, progress: Progress) -> Written:
        """Write the output. Raises UserError when it exists. A failure leaves no partial output."""
        if self.format == "areal":
            return self._areal(progress)
        if self.format == "tensors":
            one_file = self.out.suffix == ".safetensors"
            return self._tensor_file(progress) if one_file else self._tensor_folder(progress)
        return self._table(progress)

    def _table(self, progress: Progress) -> Written:
        suffix = f".{self.format}"
        out = self.out if self.out.suffix == suffix else self.out / f"{self.selection.what}{suffix}"
        total, done = self._count(), 0
        columns = COLUMNS[self.selection.what]
        with atomic_file(out, force=self.force) as draft, WRITERS[self.format](draft, columns) as writer:
            for page in row_pages.pages(self.database, self.run.id, self.selection):
                writer.write(page)
                done += len(page)
                progress(done, max(total, done))
        return Written(out, done, _size(out))

    def _areal(self, progress: Progress) -> Written:
        require_free(self.out, force=self.force)
        decode = areal_dump.tokenizer(self.tokenizer or Path(self.run.base_model))
        filtered = bool(self.selection.states) or self.selection.steps is not None
        total, done = self._count(), 0
        if not filtered:
            total += self.database.query(evaluation_paths.count_sessions, self.run.id)
        with atomic_folder(self.out, force=self.force) as draft:
            for page in areal_dump.rollouts(self.database, self.run.id, self.selection):
                areal_dump.write(draft / "rollout", page, decode)
                done += len(page)
                progress(done, max(total, done))
            for page in () if filtered else evaluation_paths.pages(self.database, self.run.id):
                areal_dump.write(draft / "eval-rollout", page, decode)
                done += len(page)
                progress(done, max(total, done))
        return Written(self.out, done, _size(self.out))

    def _tensor_file(self, progress: Progress) -> Written:
        n, width = self.database.query(row_pages.extent, self.run.id, self.selection)
        metadata = {"run": str(self.run.name)}
        done = 0
        with atomic_file(self.out, force=self.force) as draft:
            arrays = tensors.create_file(draft, n, width, metadata)
            for page in row_pages.trajectory_pages(self.database, self.run.id, self.selection):
                fitting = [tokens for _, tokens in page][: n - done]  # skip trajectories added after the count
                tensors.fill(arrays, done, fitting)
                done += len(fitting)
                progress(done, n)
                if done == n:
                    break
            del arrays
        return Written(self.out, done, _size(self.out))

    def _tensor_folder(self, progress: Progress) -> Written:
        """Write one file per step, with the batch as it was trained."""
        if self.selection.states:
            raise UserError(
                "--state: a folder of tensors has whole batches; for a selection give one file, --out X.safetensors"
            )
        from safetensors.numpy import save_file

        wanted = self.selection.steps
        chosen = [
            step
            for step in self.database.query(steps.of_run, self.run.id)
            if step.state != StepState.STARTED and (wanted is None or step.step in wanted)
        ]
        total, done = sum(step.trajectories for step in chosen), 0
        with atomic_folder(self.out, force=self.force) as draft:
            for step in chosen:
                batch = self.database.query(steps.batch, step.id)
                metadata = {"run": str(self.run.name), "step": str(step.step), "version": str(step.version_before)}
                save_file(tensors.pad_batch(batch.trajectories), draft / f"step-{step.step:06d}.safetensors", metadata)
                done += len(batch.trajectories)
                progress(done, max(total, done))
        return Written(self.out, done, _size(self.out))

    def _count(self) -> int:
        return self.database.query(row_pages.count, self.run.id, self.selection)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return sum(file.stat().st_size for file in files)
