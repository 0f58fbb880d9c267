"""The memory of a shadow: where a prepared version waits for its swap.

A swap copies the shadow into the weights in use: at the speed of the GPU's memory from there, over the bus from the
host. Imported inside SGLang's scheduler only; imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from agentrl.engine.control.preparation import SHADOW_MEMORY
from agentrl.engine.prepared.shadow_model import Shadow, reachable, storage_bytes

log = logging.getLogger(__name__)
FREE_SHARE = 0.5
"""How much of a GPU's free memory a shadow may take by itself. The rest is left to the engine's activations."""
Live = TypeVar("Live", bound=nn.Module)


def make_shadow(live: Live, device: torch.device) -> Shadow[Live]:
    """A shadow of a model on `device`: on a GPU as `publish.shadow` says, `auto`, `gpu` or `host`.

    Raises RuntimeError when it must be in the GPU's memory and does not fit.
    """
    if device.type == "cpu":
        return Shadow(live)
    where = os.environ.get(SHADOW_MEMORY, "auto")
    needed, (free, _) = storage_bytes(reachable(live)), torch.cuda.mem_get_info(device)
    if where == "gpu" or (where == "auto" and needed <= FREE_SHARE * free):
        try:
            return Shadow(live, device)
        except torch.OutOfMemoryError as error:
            if where == "gpu":
                raise RuntimeError(
                    f"publish.shadow: gpu, but the weights need {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are "
                    "free: lower engine.memory_fraction"
                ) from error
    log.info("a prepared version waits in host memory: %.1f GB, %.1f GB free on the GPU", needed / 1e9, free / 1e9)
    return Shadow(live, pinned=True)


def release_cached(device: torch.device) -> None:
    """Give a GPU's memory that no tensor uses back to other processes."""
    if device.type != "cpu":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: this thread's work runs on a stream of low priority, and is done when the block ends."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()
