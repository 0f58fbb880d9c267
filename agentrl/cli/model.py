"""`agentrl model`: creates a built-in model without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.visible import say


def model(
    name: Annotated[str, typer.Argument(help="smollm2 (SmolLM2-135M-Instruct) or tiny (0.4M-parameter Qwen2).")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to create; default: in the cache.")] = None,
) -> None:
    """Create a Hugging Face model folder from data in the installed packages, and print its path.

    An existing folder is checked and kept.
    """
    from agentrl.console import Console
    from agentrl.errors import ModelFolderError, did_you_mean
    from agentrl.models import BUILT_IN, cache_dir, make_model

    if name not in BUILT_IN:
        raise ModelFolderError(f"no built-in model {name!r}{did_you_mean(name, BUILT_IN)}")
    with Console(stderr=True).status(f"creating {name}"):
        folder = make_model(name, out or cache_dir() / name)
    say(folder)
