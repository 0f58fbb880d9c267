"""Runs one variant in a process of its own: `python -m training.worker ORDER`. ORDER is JSON.

It writes a line when it is ready. Then it makes a step for each input line, and writes the step's measurements; the
line WARM_UP requests a small step. Under RANK and WORLD_SIZE it is one rank of several; all read the same lines and
answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from agentrl.trainer.distributed import join_world
from agentrl.trainer.packing import Sample

from .batches import Shape, make_samples
from .clock import Clock, peak_bytes, reset_peak
from .trl_grpo import TRL, is_available
from .variants import Ours, Padded, Setting, Variant

VARIANTS = ("agentrl", "trl", "trl_tuned", "padded")
WARM_UP = "warm up"


@dataclass(frozen=True, slots=True)
class Order:
    """The variant and the batch to measure."""

    variant: str
    model: str
    shape: Shape
    budget: int
    minibatches: int
    device: str
    threads: int
    bfloat16: bool
    keep_gathered: bool = False

    @classmethod
    def parse(cls, text: str) -> Order:
        """Parse an order from JSON."""
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"])})

    def dump(self) -> str:
        """The order as JSON."""
        return json.dumps(asdict(self))

    @property
    def setting(self) -> Setting:
        """The settings that all variants share."""
        return Setting(
            Path(self.model), self.minibatches, self.budget, self.shape.group_size, self.bfloat16, self.keep_gathered
        )


def main() -> None:
    """Make steps until the input ends."""
    order = Order.parse(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr, since stdout is for answers
    vocabulary = json.loads((Path(order.model) / "config.json").read_text())["vocab_size"]
    samples = make_samples(order.shape, vocabulary)
    with contextlib.ExitStack() as stack:
        device = torch.device(order.device)
        torch.set_num_threads(order.threads)
        variant = make(order, samples, device, stack)
        clock = Clock(device)
        clock.watch(variant.model)
        stack.enter_context(clock.watching(variant.optimizer))
        print(json.dumps(variant.settings()), file=out, flush=True)
        for line in sys.stdin:
            clock.seconds.clear()
            reset_peak(device)
            start, cpu_start = clock.now(), time.process_time()
            loss = variant.update(samples if line.strip() != WARM_UP else one_of_each_group(samples))
            seconds, cpu_seconds = clock.now() - start, time.process_time() - cpu_start
            phases = dict(clock.seconds) | {"other": seconds - sum(clock.seconds.values())}
            answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss, "phases": phases}
            answer["peak_bytes"] = peak_bytes(device)
            print(json.dumps(answer), file=out, flush=True)


def one_of_each_group(samples: list[Sample]) -> list[Sample]:
    """One sample of each group: enough to allocate every buffer that outlives a step."""
    return list({s.tokens.group_id: s for s in samples}.values())


def make(order: Order, samples: list[Sample], device: torch.device, stack: contextlib.ExitStack) -> Variant:
    """The variant of an order. Only ours joins a process group, until the stack is closed."""
    torch.manual_seed(0)
    if order.variant == "agentrl":
        device_type: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
        return Ours(order.setting, stack.enter_context(join_world(device_type, order.threads)))
    if order.variant == "padded":
        return Padded(order.setting, device)
    if not is_available():
        raise SystemExit("TRL cannot be imported: run `make setup-trl`")
    return TRL(order.setting, samples, device, tuned=order.variant == "trl_tuned")


if __name__ == "__main__":
    main()
