"""The seconds of a step by part, on one rank.

    wait_for_batch ─► read ─► (build ─► forward ─► backward) for each microbatch ─► update ─► metrics

On a GPU, forward, backward and update are the GPU's time between two events, so that no part waits for the GPU. The
other parts are the host's time; the GPU may compute during them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Part = Literal["wait_for_batch", "read", "build", "forward", "backward", "update"]
PARTS: tuple[Part, ...] = ("wait_for_batch", "read", "build", "forward", "backward", "update")
ON_DEVICE: frozenset[Part] = frozenset({"forward", "backward", "update"})


class StepTimes:
    """Adds up the seconds of each part. `train_s` is the time of scoring and update, which all but the wait are of."""

    def __init__(self, device: torch.device, waited_s: float = 0.0) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[Part, float] = defaultdict(float)
        self._seconds["wait_for_batch"] = waited_s
        self._events: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []
        self.train_s = 0.0

    @contextmanager
    def reading(self, part: Part) -> Iterator[None]:
        """Add the time of the block to a part."""
        if self._on_gpu and part in ON_DEVICE:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            yield
            end.record()
            self._events.append((part, start, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - began

    def seconds(self) -> dict[Part, float]:
        """The seconds of each part. Waits for a GPU."""
        for part, start, end in self._events:
            end.synchronize()
            self._seconds[part] += start.elapsed_time(end) / 1000
        self._events = []
        return {part: self._seconds[part] for part in PARTS}

    def metrics(self) -> dict[str, float]:
        """The metrics of a step: each part, the whole of scoring and update, and what is none of its parts."""
        found = self.seconds()
        other = self.train_s - sum(s for part, s in found.items() if part != "wait_for_batch")
        return {f"time/{part}": s for part, s in found.items()} | {
            "time/train": self.train_s,
            "time/other": max(0.0, other),
        }
