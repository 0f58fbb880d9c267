"""Measures the time of a step by phase, and its peak memory."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PHASES = ("recompute", "forward", "backward", "step", "other")
"""Forward passes without and with gradient, the backward pass, the optimizer, and the rest (packing, loss, clipping).
"""


class Clock:
    """Seconds by phase. On a GPU every reading waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def reading(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
        start = self.now()
        yield
        self.seconds[phase] += self.now() - start

    def now(self) -> float:
        """The time in seconds, after the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def watch(self, model: nn.Module) -> None:
        """Time every forward pass of the model; a pass without gradient is the recomputation."""
        starts: list[float] = []

        def before(*_: Any) -> None:
            starts.append(self.now())

        def after(*_: Any) -> None:
            phase = "forward" if torch.is_grad_enabled() else "recompute"
            self.seconds[phase] += self.now() - starts.pop()

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    @contextlib.contextmanager
    def watching(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Time backward passes and the optimizer's steps."""
        backward = Tensor.backward
        with contextlib.ExitStack() as stack:
            start: list[float] = []
            for register, hook in (
                (optimizer.register_step_pre_hook, lambda *_: start.append(self.now())),
                (optimizer.register_step_post_hook, lambda *_: self._stepped(start.pop())),
            ):
                stack.callback(register(hook).remove)
            stack.callback(setattr, Tensor, "backward", backward)
            Tensor.backward = self._timed(backward)
            yield

    def _stepped(self, start: float) -> None:
        self.seconds["step"] += self.now() - start

    def _timed(self, backward: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            with self.reading("backward"):
                backward(*args, **kwargs)

        return timed


def reset_peak(device: torch.device) -> None:
    """Reset the peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # some containers forbid it: then the peak counts from the process's start
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The peak of memory since `reset_peak`, in bytes: of the allocator on a GPU, else the resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
