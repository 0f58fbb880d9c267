"""The files of a source, in the order in which they are read, and what identifies their content."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from agentrl.configs.publish_config import StorageConfig
from agentrl.data import hub_files
from agentrl.data.file_rows import READERS, reader_of
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.storage import datasets

PATTERN = set("*?[")
MAX_FILES = 100_000
ENDS_BYTES = 64 * 1024
"""A file's content is compared by its size and a hash of its first and last bytes."""
LIST_OF_SPLITS, STATE = "dataset_dict.json", "state.json"


class Files:
    """The files of a path. `content` identifies them. Use it as a context manager: object storage keeps a lock on a
    cached file until the end.
    """

    def __init__(self, path: str, field: str, storage: StorageConfig) -> None:
        self._held = ExitStack()
        self._path, self._field = path, field
        self._split: hub_files.HubSplit | None = None
        self._local: list[tuple[str, Path]] = []
        if path.startswith(hub_files.SCHEME):
            self._split = hub_files.find_split(path, field)
            self.content: Json = {"revision": self._split.revision, "files": list(self._split.files)}
        elif datasets.is_remote(path):
            _require_reader(path, field)
            found = self._held.enter_context(datasets.opened(path, storage, field))
            self._local = [(path, found.path)]
            self.content = {"files": [[path, found.facts.size_bytes, found.facts.sha256]]}
        else:
            self._local = [(str(file), file) for file in _on_disk(path, field)]
            self.content = {"files": [[name, *_ends(file, name, field)] for name, file in self._local]}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def __iter__(self) -> Iterator[tuple[str, Path]]:
        """(name for errors, file), in order."""
        return iter(self._local) if self._split is None else self._split.downloaded(self._field)


def _on_disk(path: str, field: str) -> list[Path]:
    if PATTERN & set(path):
        matching = sorted(Path(one) for one in glob.iglob(path, recursive=True))
        files = [file for file in matching if file.is_file()]
        if not files:
            raise UserError(f"{field}: no file matches {path}")
        if len(files) > MAX_FILES:
            raise UserError(f"{field}: {path} matches {len(files)} files, at most {MAX_FILES} are read")
        for file in files:
            _require_reader(str(file), field)
        return files
    if Path(path).is_dir():
        return _of_saved(Path(path), field)
    _require_reader(path, field)
    return [Path(path)]


def _of_saved(folder: Path, field: str) -> list[Path]:
    """The files of a folder that `datasets.save_to_disk` has written."""
    if (folder / LIST_OF_SPLITS).exists():
        splits = sorted(str(file.parent) for file in folder.glob(f"*/{STATE}"))
        raise UserError(f"{field}: {folder} holds several splits: give one of {', '.join(splits)}")
    try:
        state = json.loads((folder / STATE).read_text())
        files = [folder / one["filename"] for one in state["_data_files"]]
    except OSError as error:
        raise UserError(
            f"{field}: {folder} is a folder without {STATE}, so not from `datasets.save_to_disk`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{field}: {folder / STATE} cannot be read: {error!r}") from error
    if state.get("_indices_data_files"):
        raise UserError(f"{field}: {folder} has an index, from an old `datasets`: save it again with a newer version")
    if any(file.parent != folder for file in files):
        raise UserError(f"{field}: {folder / STATE} names files outside its folder")
    return files


def _require_reader(name: str, field: str) -> None:
    if reader_of(name) is None:
        kinds = ", ".join(suffix for suffix in READERS if suffix != ".arrow")
        raise UserError(
            f"{field}: cannot tell what {name!r} is: give a file that ends in {kinds}, a folder of "
            "`datasets.save_to_disk`, hf://OWNER/NAME:SPLIT, or module:function"
        )


def _ends(path: Path, name: str, field: str) -> Iterable[int | str]:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            for start in (0, max(0, size - ENDS_BYTES)):
                file.seek(start)
                digest.update(file.read(ENDS_BYTES))
    except OSError as error:
        raise UserError(f"{field}: cannot read {name}: {error.strerror}") from error
    return size, digest.hexdigest()
