"""The parts of `make gpu` that measure in this process. Each returns its figures: name → value and unit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from training.batches import Shape

from agentrl.domain.batching import line_up
from agentrl.trainer import packing
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.model_shape import shape_of
from agentrl.trainer.models import mechanisms
from agentrl.trainer.packing import Sample
from agentrl.trainer.run.device_defaults import RankDevice, held_bytes, kept_bytes, microbatch_tokens

from .planned_peak import planned_peak
from .subjects import OurStep, TitanStep, mfu, peak_bytes, seconds, subject

Figures = dict[str, tuple[float, str]]
GIB = 2**30


def titan(folder: Path, world: World, *, rehearse: bool) -> Figures:
    """A step on rows of equal lengths: ours (GRPO: every token is trained, none shared) and a torchtitan-like one."""
    of = subject(folder, world, rehearse=rehearse)
    rows, width, each = (4, 32, 2) if rehearse else (16, 2048, 4)
    samples = of.samples(Shape(1, rows, 1, width - 1))
    ids_BT = torch.from_numpy(np.stack([s.tokens.input_ids for s in samples]).astype(np.int64)).to(of.device)
    found: Figures = {}
    for name in ("agentrl", "titan"):
        step: Any = OurStep(of, tokens_per_microbatch=each * width) if name == "agentrl" else TitanStep(of)
        call = partial(step, samples) if name == "agentrl" else partial(step, ids_BT, each)
        taken = seconds(call, of.device, 1 if rehearse else 5)
        found[f"{name}/tokens_per_s"] = rows * width / taken, "tokens/s"
        if (share := mfu(step.flops, taken, of.device)) is not None:
            found[f"{name}/mfu"] = share, "%"
        if (peak := peak_bytes(call, of.device)) is not None:
            found[f"{name}/peak_memory"] = peak / GIB, "GiB"
        del step, call
        _free(of.device)
    found["speed"] = found["agentrl/tokens_per_s"][0] / found["titan/tokens_per_s"][0], "× titan"
    return found


def attention(folder: Path, world: World, *, rehearse: bool) -> Figures:
    """Forward and backward of two blocks over one microbatch of 4k to 128k tokens: one sequence, and a tree of 8."""
    of = subject(folder, world, rehearse=rehearse, blocks=2)
    found: Figures = {}
    for tokens in (64, 128) if rehearse else (4096, 16_384, 32_768, 65_536, 131_072):
        for name, shape in {
            "sequence": Shape(1, 1, tokens // 2, tokens // 2),
            "tree": Shape(1, 8, tokens // 2, tokens // 16, shares_prompt=True),
        }.items():
            step = OurStep(of, tokens_per_microbatch=2 * tokens, activation_checkpointing=True, train_layers=2)
            samples = of.samples(shape)
            taken = seconds(partial(step, samples), of.device, 1 if rehearse else 3)
            found[f"{name}/{tokens}/seconds"] = taken, "s"
            if (peak := peak_bytes(partial(step, samples), of.device)) is not None:
                found[f"{name}/{tokens}/peak_memory"] = peak / GIB, "GiB"
            del step
            _free(of.device)
    return found


def gains(folder: Path, world: World, *, rehearse: bool) -> Figures:
    """A step with shared prompts merged and not merged, and with sequences packed and one by one; and in theory."""
    of = subject(folder, world, rehearse=rehearse)
    shared = Shape(2, 4, 48, 16, shares_prompt=True) if rehearse else Shape(4, 8, 1536, 512, shares_prompt=True)
    tails = Shape(2, 4, 8, 40, sigma=1.0) if rehearse else Shape(4, 8, 64, 2048, sigma=1.0)
    budget, rounds = (256, 1) if rehearse else (8192, 3)
    found: Figures = {}

    def taken(name: str, samples: list[Sample], *, tree: bool = True, packed: bool = True) -> None:
        with (
            patch.object(packing, "build_tree", packing.build_tree if tree else line_up),
            patch.object(mechanisms, "unpackable", mechanisms.unpackable if packed else lambda _: "measured"),
        ):
            step = OurStep(of, tokens_per_microbatch=budget)
            found[name] = seconds(partial(step, samples), of.device, rounds), "s"
        del step
        _free(of.device)

    taken("shared/merged", of.samples(shared))
    taken("shared/apart", of.samples(shared), tree=False)
    taken("tails/packed", of.samples(tails))
    taken("tails/one_by_one", of.samples(tails), packed=False)
    found["tree_gain"] = found["shared/apart"][0] / found["shared/merged"][0], "×"
    each = shared.prompt + shared.output
    merged = shared.prompt + shared.group_size * shared.output
    found["tree_gain/theory"] = shared.group_size * each / merged, "× tokens"
    found["packing_gain"] = found["tails/one_by_one"][0] / found["tails/packed"][0], "×"
    return found


def memory(folder: Path, world: World, *, rehearse: bool) -> Figures:
    """The peak of steps with and without checkpointing, against the planner's and against the estimate behind
    `tokens_per_microbatch: auto`; and whether a step of just so many tokens fits.
    """
    of = subject(folder, world, rehearse=rehearse)
    shape = shape_of(of.config)
    assert shape is not None
    found: Figures = {}
    total = torch.cuda.get_device_properties(of.device).total_memory if of.device.type == "cuda" else 24 * GIB
    for checkpointing in (False, True):
        name = "checkpointing" if checkpointing else "plain"
        step = OurStep(of, activation_checkpointing=checkpointing, tokens_per_microbatch=64 if rehearse else 4096)
        device = RankDevice(kind="cuda", memory_bytes=int(total), shards=1)
        auto = step.config.model_copy(update={"tokens_per_microbatch": "auto"})
        most = microbatch_tokens(auto, step.config.dtype, shape, device)
        found[f"{name}/auto_tokens"] = float(most), "tokens"
        for label, tokens in (("4k", 64 if rehearse else 4096), ("auto", 128 if rehearse else most)):
            step.config = step.config.model_copy(update={"tokens_per_microbatch": tokens})
            samples = of.samples(Shape(1, 1, tokens // 2, tokens - tokens // 2))
            step(samples)  # makes the moments
            peak = peak_bytes(partial(step, samples), of.device)
            estimate = held_bytes(step.config, step.config.dtype, shape, 1)
            estimate += tokens * kept_bytes(step.config, step.config.dtype, shape)
            found[f"{name}/{label}/estimate"] = estimate / GIB, "GiB"
            found[f"{name}/{label}/plan"] = planned_peak(of.folder, step.config, tokens) / GIB, "GiB"
            if peak is not None:
                found[f"{name}/{label}/peak"] = peak / GIB, "GiB"
        del step
        _free(of.device)
    return found


PARTS: dict[str, Callable[..., Figures]] = {"titan": titan, "attention": attention, "gains": gains, "memory": memory}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
