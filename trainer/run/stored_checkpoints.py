"""The run's checkpoints in object storage: `URL/RUN/checkpoints/step-000012-STEP_ID/`. Rank 0 alone uses them.

    complete on disk ── send ──► uploaded by a thread while steps go on ──► those that were deleted on disk are deleted
    absent on disk   ◄─ fetch ── the newest complete one of a step that is in the store

At most one upload runs: `send` waits for the one before. Checkpoints are deleted on disk only after a newer one is
there, so an upload's folder stays until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import DamagedObject, StorageError
from agentrl.storage import stored_folders
from agentrl.storage.object_store import ObjectStore
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS


class StoredCheckpoints:
    """The checkpoints of one run in a store. All methods raise StorageError."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store = store
        self._key = f"{run}/{CHECKPOINTS}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._sending: Future[None] | None = None

    def send(self, folder: Path, deleted: Sequence[str] = ()) -> None:
        """Begin to upload a checkpoint; then delete those of these names. Waits for the upload before."""
        self.wait()
        self._sending = self._thread.submit(self._send, folder, deleted)

    def wait(self) -> None:
        """Wait until the last upload is done. Raises its error, once."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result()

    def fetch(self, root: Path, survives: Callable[[str], bool], say: Callable[[str], None]) -> None:
        """Copy the newest usable checkpoint to `root`, if it is newer than the newest usable one there."""
        for name in self.newer(root, survives):
            try:
                stored_folders.download(self._store, f"{self._key}/{name}", root / name)
            except DamagedObject as error:
                say(f"ignoring checkpoint {error}")
            else:
                say(f"copied checkpoint {name} from {self._store.url}/{self._key}")
                return

    def newer(self, root: Path, survives: Callable[[str], bool]) -> Iterator[str]:
        """Names of checkpoints of steps that `survives(step_id)`, newer than the newest usable one in `root`.

        The newest is first. They may be incomplete.
        """
        here, _ = checkpoint_folders.newest(root, survives)
        for name, step_id in checkpoint_folders.newer(self._store.names(self._key), here):
            if survives(step_id):
                yield name

    def has(self, name: str) -> bool:
        """Whether a checkpoint is complete."""
        return stored_folders.is_complete(self._store, f"{self._key}/{name}")

    def _send(self, folder: Path, deleted: Sequence[str]) -> None:
        try:
            stored_folders.upload(self._store, folder, f"{self._key}/{folder.name}")
        except OSError as error:
            raise StorageError(f"cannot read checkpoint {folder}: {error.strerror}") from error
        for name in deleted:
            stored_folders.delete(self._store, f"{self._key}/{name}")


def stored_checkpoints(config: RunConfig) -> StoredCheckpoints | None:
    """Those of a run with `storage.url`; None for others."""
    url = config.storage.url
    return None if url is None else StoredCheckpoints(ObjectStore(url), config.name)


def stored_weights(config: RunConfig) -> ObjectStore | None:
    """The versions of a run with `storage.weights`; None for others."""
    url = config.storage.weights_url(config.name)
    return None if url is None else ObjectStore(url)


def can_fetch(config: RunConfig, root: Path, survives: Callable[[str], bool]) -> bool:
    """Whether the storage has a newer usable checkpoint than `root`. Reads only."""
    stored = stored_checkpoints(config)
    return stored is not None and any(stored.has(name) for name in stored.newer(root, survives))
