"""Imports the user's code by name (`module:name`), and digests its source."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, did_you_mean

PARAMETERS = {
    "rollout.accept": ("task", "rewards"),
    "trainer.algorithm.loss": ("tokens", "totals", "algorithm"),
    "trainer.algorithm.advantage": ("trajectories", "algorithm"),
    "trainer.teacher_prompt": ("task", "messages"),
}
"""The positional arguments of the function that a key of the configuration names."""
MOST_FILES = 5000
"""A package with more source files is digested as its module alone."""


def load_object(spec: str, field: str) -> Any:
    """Import `module:name`. Raises UserError with `field` and the nearest existing name."""
    module_name, sep, name = spec.partition(":")
    if not sep or not module_name or not name or module_name.startswith("."):
        raise UserError(f"{field}: {spec!r} must look like module:name")
    _see_working_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{field}: cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise UserError(f"{field}: {module_name!r} has no {name!r}{did_you_mean(name, public)}") from None


def load_function(spec: str, field: str) -> Callable[..., Any]:
    """Import the function that the key `field` names. Raises UserError when it cannot be called with PARAMETERS."""
    function = load_object(spec, field)
    if not callable(function):
        raise UserError(f"{field}: {spec!r} is not a function")
    check_parameters(function, field)
    loaded: Callable[..., Any] = function
    return loaded


def check_parameters(function: Callable[..., Any], field: str) -> None:
    """Raise UserError for a function that cannot be called with the PARAMETERS of `field`, and for a coroutine."""
    name, expected = getattr(function, "__name__", repr(function)), PARAMETERS[field]
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{field}: {name} must be a plain function, not `async def`")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind(*expected)
    except TypeError as error:
        raise UserError(f"{field}: {name}{signature} is called with ({', '.join(expected)}): {error}") from error


def source_digest(spec: str) -> str | None:
    """SHA-256 of the source of `module:name`: of the package that its module lies in, else of its file.

    Imports nothing. None for a module without a source file.
    """
    _see_working_folder()
    package, file = _located(spec.partition(":")[0])
    if file is None:
        return None
    files = _sources(package.parent) if package is not None else []
    digest = hashlib.sha256()
    for one in files or [file]:
        content = one.read_bytes()
        name = one.relative_to(package.parent).as_posix() if files and package is not None else one.name
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _located(module: str) -> tuple[Path | None, Path | None]:
    """The `__init__.py` of the outermost package of a module, if it has one, and the module's own source file."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    package = _source(spec) if spec is not None and spec.submodule_search_locations is not None else None
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return package, None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return package, _source(spec)


def _source(spec: ModuleSpec | None) -> Path | None:
    file = Path(spec.origin or "") if spec is not None else Path()
    return file if file.suffix == ".py" and file.is_file() else None


def _sources(folder: Path) -> list[Path]:
    """The .py files of a package, in order; none when there are too many."""
    found: list[Path] = []
    for file in folder.rglob("*.py"):
        found.append(file)
        if len(found) > MOST_FILES:
            return []
    return sorted(file for file in found if file.is_file())


def _see_working_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # user modules beside the config
