"""The run's checkpoints in object storage: `URL/RUN/checkpoints/step-000012-STEP_ID/`. Rank 0 alone uses them.

    complete on disk ── send ──► uploaded by a thread while steps go on ──► those that were deleted on disk are deleted
    absent on disk   ◄─ fetch ── the newest complete one of a step that is in the store

One upload runs at a time. A checkpoint that is sent meanwhile waits; if another one is sent, it takes its place, so
training never waits for the storage. `held` names the checkpoints that must stay on disk: those of the upload, and the
newest one that is complete in both places. A file beside the checkpoints names those that are to be deleted in the
storage, so a failed upload or the end of the process does not leave them there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import DamagedObject, StorageError, StoreError
from agentrl.files import atomic_file
from agentrl.storage import stored_folders
from agentrl.storage.object_store import ObjectStore
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, Ignored
from agentrl.trainer.checkpoints.checkpoint_folders import Check

TO_DELETE = "delete-in-storage.txt"
"""The file in the run's checkpoints folder with a name per line."""


class StoredCheckpoints:
    """The checkpoints of one run in a store, and on disk in `root`. Methods that use the storage raise StorageError."""

    def __init__(self, store: ObjectStore, run: str, root: Path) -> None:
        self._store = store
        self._key = f"{run}/{CHECKPOINTS}"
        self._root = root
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._uploads: list[Future[None]] = []
        self._lock = threading.Lock()  # for the fields below and the file TO_DELETE
        self._waiting: list[Path] = []  # checkpoints to upload next, the newest first
        self._running: list[Path] = []  # those of the upload that runs
        self._complete: set[str] = set()  # names of those that are complete in both places
        self._arrived: list[str] = []  # step ids of uploads that `arrived` has not returned yet

    def delete_later(self, names: Sequence[str]) -> None:
        """Delete checkpoints after an upload of `send`, once they are deleted on disk. Raises StorageError."""
        if names:
            self._to_delete(add=names)

    def send(self, kept: Sequence[Path]) -> None:
        """Begin to upload those of the `kept` checkpoints that the storage lacks, given the newest first; then delete
        those of `delete_later`. Raises the error of the upload before.
        """
        self._raise_ended()
        with self._lock:
            self._waiting = list(kept)
        self._uploads.append(self._thread.submit(self._upload_waiting))

    def wait(self) -> None:
        """Wait until all uploads are done. Raises the error of one, once."""
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.result()

    def held(self) -> set[str]:
        """Names of checkpoints that must stay on disk for now."""
        with self._lock:
            busy = {folder.name for folder in (*self._waiting, *self._running)}
            newest = sorted(self._complete, key=lambda name: checkpoint_folders.order(Path(name)))[-1:]
            return busy | set(newest)

    def arrived(self) -> list[str]:
        """Step ids of the checkpoints that became complete in the storage since the last call."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            return arrived

    def fetch(self, root: Path, survives: Callable[[str], bool], say: Callable[[str], None], check: Check) -> None:
        """Copy the newest checkpoint that passes `check` to `root`, if it is newer than the newest such one there. One
        that fails is set aside.
        """
        for name in self.newer(root, survives, check):
            try:
                stored_folders.download(self._store, f"{self._key}/{name}", root / name)
                check(checkpoint_folders.read(root / name))
            except DamagedObject as error:
                say(f"ignoring checkpoint {error}")
            except StoreError as error:
                aside = checkpoint_folders.set_aside(Ignored(root / name, str(error)))
                say(f"ignoring checkpoint {self._store.url}/{self._key}/{name}: {error} (set aside as {aside.name})")
            else:
                say(f"copied checkpoint {name} from {self._store.url}/{self._key}")
                break
        here = {folder.name for folder in checkpoint_folders.folders(root)}
        self._arrive([name for name in self._store.names(self._key) if name in here and self.has(name)])

    def newer(self, root: Path, survives: Callable[[str], bool], check: Check) -> Iterator[str]:
        """Names of checkpoints of steps that `survives(step_id)`, newer than the newest usable one in `root`.

        The newest is first. They may be incomplete.
        """
        here, _ = checkpoint_folders.newest(root, survives, check)
        for name, step_id in checkpoint_folders.newer(self._store.names(self._key), here):
            if survives(step_id):
                yield name

    def has(self, name: str) -> bool:
        """Whether a checkpoint is complete."""
        return stored_folders.is_complete(self._store, f"{self._key}/{name}")

    def _raise_ended(self) -> None:
        ended = [upload for upload in self._uploads if upload.done()]
        self._uploads = [upload for upload in self._uploads if not upload.done()]
        for upload in ended:
            upload.result()

    def _upload_waiting(self) -> None:
        with self._lock:
            self._running, self._waiting = self._waiting, []
        try:
            for folder in self._running:
                self._upload(folder)
        finally:
            with self._lock:
                self._running = []
        for name in sorted(self._to_delete()):
            if not (self._root / name).exists():
                stored_folders.delete(self._store, f"{self._key}/{name}")
                self._to_delete(remove=[name])

    def _upload(self, folder: Path) -> None:
        """Upload a checkpoint, unless the storage has it."""
        name = folder.name
        if name in self._complete:
            return
        if not self.has(name):
            try:
                stored_folders.upload(self._store, folder, f"{self._key}/{name}")
            except OSError as error:
                raise StorageError(f"cannot read checkpoint {folder}: {error.strerror}") from error
        self._arrive([name])

    def _to_delete(self, add: Sequence[str] = (), remove: Sequence[str] = ()) -> set[str]:
        """The names in TO_DELETE, after a change. Raises StorageError when the file cannot be used."""
        path = self._root / TO_DELETE
        try:
            with self._lock:
                noted = set(path.read_text().split()) if path.exists() else set()
                changed = (noted | set(add)) - set(remove)
                if changed != noted:
                    with atomic_file(path) as draft:
                        draft.write_text("".join(f"{name}\n" for name in sorted(changed)))
        except OSError as error:
            raise StorageError(f"cannot use {path}: {error.strerror}") from error
        return changed

    def _arrive(self, names: Sequence[str]) -> None:
        """Note checkpoints that are complete in both places."""
        with self._lock:
            self._complete |= set(names)
            self._arrived += [step_id for _, step_id in checkpoint_folders.newer(names, None)]


def stored_checkpoints(config: RunConfig) -> StoredCheckpoints | None:
    """Those of a run with `storage.url`; None for others."""
    url = config.storage.url
    return None if url is None else StoredCheckpoints(ObjectStore(url), config.name, config.run_dir / CHECKPOINTS)


def stored_weights(config: RunConfig) -> ObjectStore | None:
    """The versions of a run with `storage.weights`; None for others."""
    url = config.storage.weights_url(config.name)
    return None if url is None else ObjectStore(url)


def can_fetch(config: RunConfig, root: Path, survives: Callable[[str], bool]) -> bool:
    """Whether the storage has a newer usable checkpoint than `root`. Reads only."""
    stored = stored_checkpoints(config)
    return stored is not None and any(stored.has(name) for name in stored.newer(root, survives, lambda _: None))
