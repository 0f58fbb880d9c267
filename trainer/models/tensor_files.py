"""Reads tensors from a model folder's safetensors files, as slices that read only the requested part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentrl.errors import ModelFolderError

INDEX = "model.safetensors.index.json"
"""The file that maps tensors to files, in folders with several files."""
SINGLE = "model.safetensors"


def stored(folder: Path, names: Set[str]) -> Iterator[tuple[str, Any]]:
    """The folder's tensors of these names, as slices, file by file."""
    yield from stored_in(files_of(folder), names)


def stored_in(files: Mapping[str, Path], names: Set[str]) -> Iterator[tuple[str, Any]]:
    """The tensors of these names, as slices, file by file. `files` maps every tensor to its file."""
    for path in sorted({path for name, path in files.items() if name in names}):
        yield from slices(path, [name for name, file in files.items() if file == path and name in names])


def files_of(folder: Path) -> dict[str, Path]:
    """Maps every tensor of a folder to its file. Raises ModelFolderError when the folder has no safetensors."""
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    if not (folder / SINGLE).is_file():
        raise ModelFolderError(f"model folder {folder} has neither {SINGLE} nor {INDEX}")
    return dict.fromkeys(tensor_names(folder / SINGLE), folder / SINGLE)


def tensor_names(path: Path) -> list[str]:
    """The names of a safetensors file's tensors. Raises ModelFolderError when the file cannot be read."""
    return [name for name, _ in slices(path)]


@contextmanager
def opened(files: Mapping[str, Path]) -> Iterator[Callable[[str], Any]]:
    """A function that returns a slice of the tensor of a name. Files stay open until the block ends."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def open_slice(name: str) -> Any:
            path = files[name]
            try:
                if path not in handles:
                    handles[path] = stack.enter_context(safe_open(path, framework="pt"))
                return handles[path].get_slice(name)
            except (OSError, SafetensorError) as error:
                raise ModelFolderError(f"{path} cannot be read: {error}") from error

        yield open_slice


def slices(path: Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The tensors of a file, or those of these names, as slices."""
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys() if names is None else names:
                yield name, tensors.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
