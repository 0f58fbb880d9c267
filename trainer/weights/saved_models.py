"""The folders of `trainer.save_every`: `models/step-000100/`, a Hugging Face folder of every Nth step's model.

    the step's checkpoint is complete ──► a thread writes the folder from it ──► older folders are deleted (keep_models)

The checkpoint stays on disk until its folder is complete (`held`). A trainer that was killed meanwhile writes the
folder after its resume. A step that was rolled back and trained again replaces its folder.
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.errors import StoreError
from agentrl.trainer.checkpoints.checkpoint import Checkpoint
from agentrl.trainer.weights import streamed_model
from agentrl.trainer.weights.streamed_model import FACTS, facts_of

MODELS = "models"
"""Folder of the saved models, in the run's folder."""


class SavedModels:
    """The saved models of a run. Rank 0 alone uses them. Methods raise StoreError and ModelFolderError of a folder that
    could not be written.
    """

    def __init__(self, run: str, run_dir: Path, base_model: Path, adapter: AdapterConfig, every: int, keep: int | None):
        self._run, self._base_model, self._adapter = run, base_model, adapter
        self._every, self._keep = every, keep
        self._root = run_dir / MODELS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saved-model")
        self._writing: tuple[str, Future[None]] | None = None  # the checkpoint's name

    def offer(self, found: Checkpoint) -> None:
        """Begin to write the folder of a checkpoint's step, if it should have one that is not there. Waits for the one
        before, and raises its error.
        """
        if self._writing is not None and self._writing[1].done():
            self.wait()
        if found.record.step % self._every or self._has(found):
            return
        self.wait()
        self._writing = found.folder.name, self._thread.submit(self._write, found)

    def held(self) -> set[str]:
        """Names of checkpoints that must stay on disk for now."""
        return set() if self._writing is None or self._writing[1].done() else {self._writing[0]}

    def wait(self) -> None:
        """Wait until the last folder is complete."""
        if self._writing is not None:
            (_, future), self._writing = self._writing, None
            future.result()

    def _folder(self, found: Checkpoint) -> Path:
        return self._root / f"step-{found.record.step:06d}"

    def _has(self, found: Checkpoint) -> bool:
        try:
            return bool(json.loads((self._folder(found) / FACTS).read_text()) == facts_of(found, self._run))
        except (OSError, ValueError):
            return False

    def _write(self, found: Checkpoint) -> None:
        folder = self._folder(found)
        try:
            streamed_model.write(folder, found, self._base_model, self._adapter, self._run)
            saved = sorted((step, path) for path in self._root.glob("step-*") if (step := _step(path)) is not None)
            for _, path in saved[: -self._keep] if self._keep else []:
                shutil.rmtree(path)
        except OSError as error:
            raise StoreError(f"model {folder} cannot be written: {error}") from error


def _step(folder: Path) -> int | None:
    """The step of a saved model's folder; None for other folders."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match and (folder / FACTS).is_file() else None
