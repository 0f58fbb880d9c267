"""Resolves model names to folders: `resolve_model("tiny" | "smollm2" | folder)`. Built-in models need no download."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentrl.domain.experts.routed_experts import RoutingShape
from agentrl.errors import ModelFolderError, did_you_mean

BUILT_IN = ("smollm2", "tiny")


def cache_dir() -> Path:
    """`$AGENTRL_CACHE/models`, by default `~/.cache/agentrl/models`."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl") / "models"


def resolve_model(name_or_dir: str, cache: Path | None = None, *, weights: bool = True) -> Path:
    """The Hugging Face folder of a model. A built-in model is created in `cache` on first use.

    With `weights=False` a config and a tokenizer suffice. Raises ModelFolderError: one line with what is missing.
    """
    if name_or_dir in BUILT_IN:
        return make_model(name_or_dir, (cache or cache_dir()) / name_or_dir)
    folder = Path(name_or_dir).expanduser()
    if not folder.exists() and os.sep not in name_or_dir:
        raise ModelFolderError(f"no model {name_or_dir!r}{did_you_mean(name_or_dir, BUILT_IN)}, or give a local folder")
    check_model_folder(folder, weights=weights)
    return folder.resolve()


def make_model(name: str, out: Path) -> Path:
    """Create the built-in model `name` at `out`, or check and return an existing `out`.

    The model is built in a temporary folder under a lock and renamed, so `out` is complete or absent.
    """
    if out.exists():
        check_model_folder(out)
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if out.exists():  # created by another process
            return out
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            _builder(name)(staging)
            check_model_folder(staging)
            staging.chmod(0o755)  # readable by other users of the cache
            for file in staging.iterdir():
                file.chmod(0o644)
            staging.rename(out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return out


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors files."""
    return any(folder.glob("*.safetensors"))


def check_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise ModelFolderError unless `folder` has a config, a tokenizer and, if required, weights."""
    if not folder.is_dir():
        raise ModelFolderError(f"model folder {folder} does not exist")
    missing = [
        what
        for what, patterns in {
            "config.json": ["config.json"],
            "weights (*.safetensors)": ["*.safetensors"],
            "a tokenizer (tokenizer.json)": ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"],
        }.items()
        if not any(any(folder.glob(pattern)) for pattern in patterns) and (weights or "weights" not in what)
    ]
    if missing:
        raise ModelFolderError(f"model folder {folder} has no {', no '.join(missing)}")


def routing_shape(folder: Path) -> RoutingShape:
    """The sizes of a mixture's routing, from its configuration. Raises ModelFolderError for a model without experts."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        shape = RoutingShape.of(config)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"trainer.routing_replay: model folder {folder}: {error}") from error
    if shape is None:
        raise ModelFolderError(f"trainer.routing_replay: model folder {folder} has no experts: set it to off")
    return shape


def linear_layers(folder: Path) -> list[str]:
    """Names of the linear layers in a model's blocks, read from its files. The output head is excluded."""
    found = set()
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    in_block = re.fullmatch(r".*\.\d+\.(?:.*\.)?(\w+)\.weight", name)
                    if in_block and len(tensors.get_slice(name).get_shape()) == 2:
                        found.add(in_block[1])
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from error
    return sorted(found)


def _builder(name: str) -> Callable[[Path], None]:
    if name == "smollm2":
        from agentrl.models.smollm2 import build
    elif name == "tiny":
        from agentrl.models.tiny import build
    else:
        raise ModelFolderError(f"no built-in model {name!r}{did_you_mean(name, BUILT_IN)}")
    return build
