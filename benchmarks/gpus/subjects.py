"""What the parts measure: a model with random weights, a batch, our trainer's step, and a step like torchtitan's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training.batches import Shape, make_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.flops import PassCounts, Work, peak_flops, update_flops
from agentrl.trainer.models import run_models
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample
from agentrl.trainer.update import update_policy

LARGE = 60 * 2**30
"""Memory from which the larger model is measured."""
COMMON: dict[str, Any] = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
SIZES: dict[str, dict[str, Any]] = {
    "1.7B": {
        **COMMON,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "0.6B": {
        **COMMON,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "tiny": {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""Shapes of Qwen3."""
ALGORITHM = {"preset": "grpo", "correction": "none"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model's folder, its configuration, and what computes it."""

    folder: Path
    config: dict[str, Any]
    size: str
    world: World

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.world.device

    def samples(self, shape: Shape) -> list[Sample]:
        """A batch."""
        return make_samples(shape, self.config["vocab_size"])


def subject(folder: Path, world: World, *, rehearse: bool, blocks: int | None = None) -> Subject:
    """A random model of the largest size that suits the device, with fewer `blocks` where given."""
    size = "tiny"
    if not rehearse:
        size = "1.7B" if torch.cuda.get_device_properties(world.device).total_memory > LARGE else "0.6B"
    return Subject(folder, save_random(folder, size, world.device, blocks), size, world)


def save_random(folder: Path, size: str, device: torch.device, blocks: int | None = None) -> dict[str, Any]:
    """Save a Qwen3 with random weights in bfloat16; returns its configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = SIZES[size] | ({"num_hidden_layers": blocks} if blocks else {})
    config = Qwen3Config(**settings, tie_word_embeddings=True, max_position_embeddings=262_144)
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.cpu().save_pretrained(folder)
    return dict(config.to_dict())


class OurStep:
    """`update_policy` on a batch, with this trainer's settings."""

    def __init__(self, of: Subject, **settings: Any) -> None:
        self._of = of
        dtype = "bfloat16" if of.device.type == "cuda" else "float32"
        self.config = TrainerConfig(**{"dtype": dtype, "algorithm": ALGORITHM} | settings)
        self.policy = run_models.load(Policy, of.folder, self.config, of.world)
        self.optimizer = make_optimizer(self.policy, self.config)
        self.flops = 0.0

    def __call__(self, samples: list[Sample]) -> float:
        """Make a step; returns its loss."""
        found = update_policy(self.policy, self.optimizer, samples, 0, {0: 0}, self.config, self._of.world)
        self.flops = found.get("flops", 0.0)
        return found["loss"]


class TitanStep:
    """A pretraining step as torchtitan makes it: FSDP2 by block, bfloat16 compute, float32 master weights, reduction
    and loss, PyTorch's causal attention, fused AdamW; without compilation. Rows have equal lengths.
    """

    def __init__(self, of: Subject) -> None:
        from transformers import AutoModelForCausalLM

        self._of = of
        model: Any = AutoModelForCausalLM.from_pretrained(
            of.folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).to(of.device)
        dtype = torch.bfloat16 if of.device.type == "cuda" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, mesh=of.world.mesh.whole, mp_policy=policy)
        self.model: Any = fully_shard(model, mesh=of.world.mesh.whole, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.flops = 0.0

    def __call__(self, ids_BT: Tensor, rows: int) -> float:
        """Make a step over microbatches of `rows` rows; returns its loss."""
        total = 0.0
        for part_bT in ids_BT.split(rows):
            logits_bTV = self.model(input_ids=part_bT, use_cache=False).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits_bTV.flatten(0, 1), part_bT[:, 1:].flatten())
            (loss * len(part_bT) / len(ids_BT)).backward()
            total += loss.item() * len(part_bT) / len(ids_BT)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        width = ids_BT.shape[1]
        work = Work(ids_BT.numel(), ids_BT.numel(), len(ids_BT) * width * (width + 1) / 2)
        self.flops = update_flops(self._of.config, PassCounts(work, work), TrainerConfig())
        return total


def seconds(step: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median time of a step, after one that warms up."""
    taken = []
    for round_ in range(-1, rounds):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        if round_ >= 0:
            taken.append(time.perf_counter() - start)
    return median(taken)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that tensors take during a step on a GPU; None on a CPU."""
    if device.type != "cuda":
        step()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return int(torch.cuda.max_memory_allocated(device))


def mfu(flops: float, taken_s: float, device: torch.device) -> float | None:
    """Percent of the device's peak; None where that is not known."""
    peak = peak_flops(device)
    return None if peak is None else 100 * flops / taken_s / peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
