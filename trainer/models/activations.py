"""Which activations of a trained block wait for the backward pass: none but its input, on the GPU or in CPU memory.

forward    block 1 ─► input 1 ─► block 2 ─► input 2 ─► …      an input is copied out while its block computes
backward   … ◄─ block 2 again ◄─ input 2 ◄─ block 1 again     an input is copied back when its block needs it
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


class Elsewhere(NamedTuple):
    """A tensor in CPU memory, and when its copy is complete (None: it is)."""

    tensor: Tensor
    device: torch.device
    copied: torch.cuda.Event | None


class Offload(saved_tensors_hooks):
    """Inside this context, autograd saves copies in CPU memory of tensors of at least `least_bytes`.

    On CUDA the copies are pinned and made on a stream of their own, so that neither the GPU nor the CPU waits for them.
    """

    def __init__(self, least_bytes: int = 2**20) -> None:
        self.least_bytes = least_bytes
        self.moved_bytes = 0  # since it was made
        self._stream: torch.cuda.Stream | None = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Elsewhere:
        if tensor.nbytes < self.least_bytes:
            return tensor
        self.moved_bytes += tensor.nbytes
        if tensor.device.type != "cuda":
            return Elsewhere(tensor.detach().clone(), tensor.device, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not reused before the copy is complete
        return Elsewhere(copy, tensor.device, self._stream.record_event())

    def _unpack(self, saved: Tensor | Elsewhere) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.copied is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.copied)
        return saved.tensor.to(saved.device, non_blocking=True)


def checkpoint_trained(blocks: nn.ModuleList, offload: Offload | None, contexts: Contexts | None = None) -> None:
    """Make trained blocks keep only their input, and compute again in the backward pass; with `offload`, keep it there.
    `contexts` are those of a block's first pass and of its recomputation, made as the first begins.

    Called before FSDP's hooks are added, so that weights are gathered once for recomputation and backward.
    """
    for block in blocks:
        if any(p.requires_grad for p in block.parameters()):
            # There is no dropout, so no random state to restore.
            made = contexts or noop_context_fn
            again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=made)
            block.forward = again if offload is None else _inside(offload, again)


def _inside(offload: Offload, compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with offload:  # checkpoint saves the block's input through the hooks around it
            return compute(*arguments, **named)

    return run
