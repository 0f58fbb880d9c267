"""Measures hybrid models packed along a tree against each sequence alone, and against packing without their states.

    python benchmarks/hybrid.py --out benchmarks/results/hybrid.json
    python benchmarks/hybrid.py --quick 1

The models have random weights: the layers of Qwen3.5, Qwen3-Next and LFM2 in their order, with their heads' sizes, but
narrow and few.

- `logprobs_apart/MODEL/packed`: the largest difference between the logprobs of a prompt of 70 tokens with branches of
  5, 1 and 66, packed along their tree, and the same of each sequence alone. `…/without_states`: the same where layers
  with a state read the tree as one sequence.
- `hidden_apart/MODEL/…`: the largest distance of a token's last hidden states, relative to the largest of their sizes.
- `gradient_apart/MODEL/…`: the distance of the whole gradients, relative to their size.
- `seconds/MODEL/SHAPE/packed` and `…/unpacked`: a forward and a backward pass over one group. A shape is prompt x
  branches x tokens of a branch. The ratio is the gain.
- `theory/SHAPE`: the tokens of all sequences over the distinct ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import numpy as np
import torch
from torch import Tensor

from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models import mechanisms
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.packing import Microbatch, Sample, collate_share, make_units, plan
from agentrl.trainer.recurrence import carrying

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA: dict[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", DELTA),
    "qwen3-next": ("Qwen3Next", DELTA | EXPERTS),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
}
"""Name → the class of its configuration, and what is special in that."""
SHAPES = [(64, 4, 64), (64, 8, 256), (256, 8, 64), (512, 8, 16), (1024, 8, 64), (1024, 4, 256)]
"""Prompt, branches, tokens of a branch."""
QUICK = [(16, 3, 8)]
UNEVEN = (70, (5, 1, 66))
"""The prompt and the branches whose logprobs are compared."""


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(__doc__, rounds=(int, 3, "rounds of each time"), quick=(int, 0, "1: a tiny shape"))
    report = harness.Report("hybrid")
    shapes = QUICK if options.quick else SHAPES
    report.notes |= {"threads": torch.get_num_threads(), "type": "float32", "sizes": SIZES}
    for shape in shapes:
        report.add(f"theory/{named(shape)}", [theory(*shape)], "×")
    with tempfile.TemporaryDirectory() as name, join_world("cpu", threads=torch.get_num_threads()) as world:
        for model in MODELS:
            folder = save(model, Path(name) / model)
            compare(report, model, folder, world)
            for shape in shapes:
                measure(report, model, folder, shape, 1 if options.quick else options.rounds, world)
    harness.finish(report, options.out)


def named(shape: tuple[int, int, int]) -> str:
    """A shape's name."""
    return "x".join(map(str, shape))


def theory(prompt: int, branches: int, tokens: int) -> float:
    """Tokens of all sequences over the distinct ones; a sequence's last token is only predicted."""
    return branches * (prompt + tokens - 1) / (prompt + branches * (tokens - 1))


def save(model: str, folder: Path) -> Path:
    """Write a model with random weights."""
    import transformers

    family, special = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | special))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, world: World, variant: str) -> Policy:
    """The model: `packed`, `unpacked`, or packed `without_states`."""
    with without_states() if variant == "without_states" else unpacked_if(variant == "unpacked"):
        policy = load_sharded(Policy, folder, world.mesh)
    if variant == "without_states":
        policy.read()  # although loading found that its numbers are others
    assert bool(policy.unpacked) == (variant == "unpacked")
    return policy


@contextmanager
def without_states() -> Iterator[None]:
    """Models that are loaded read a tree as if all layers were attention."""
    with patch.object(carrying, "carry", lambda blocks: None):
        yield


@contextmanager
def unpacked_if(asked: bool) -> Iterator[None]:
    """Models that are loaded are unpacked, if asked."""
    if not asked:
        yield
        return
    with patch.object(mechanisms, "unpackable", lambda lm: "the benchmark asked for it"):
        yield


def group(prompt: int, branches: tuple[int, ...]) -> list[Sample]:
    """A prompt and its branches, of random tokens; all tokens but the first are predicted."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, SIZES["vocab_size"], prompt)
    return [
        sample(i, np.concatenate([shared, rng.integers(3, SIZES["vocab_size"], n)])) for i, n in enumerate(branches)
    ]


def sample(number: int, ids: np.ndarray[Any, Any]) -> Sample:
    """One sequence, sampled in one turn."""
    sampled = np.arange(len(ids)) > 0
    tokens = TrajectoryTokens(
        trajectory_id=str(number),
        session_id="",
        episode_id="",
        group_id="",
        input_ids=ids.astype(np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(sampled, 0, PROMPT_VERSION).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(len(ids), np.float32),
        turn_returns=np.zeros(1),
        episode_return=0.0,
    )
    return Sample(tokens, np.zeros(len(ids), np.float32))


def microbatches(policy: Policy, samples: list[Sample]) -> list[Microbatch]:
    """The samples, as the model reads them."""
    budget = policy.budget(10**9)
    (by_rank,) = plan(make_units(samples, budget), ranks=1, minibatches=1, budget=budget)
    return collate_share(by_rank, 0, budget)


def passes(policy: Policy, samples: list[Sample]) -> dict[str, Tensor]:
    """(S,) logprobs of each sequence, of one forward pass; the gradients of their sum, of one backward pass."""
    policy.zero_grad()
    found: dict[str, Tensor] = {}
    for m in microbatches(policy, samples):
        logprobs_S = policy(m)[0][m.predictions_S]
        logprobs_S.sum().backward()
        found |= by_sequence(logprobs_S.detach(), m)
    return found


@torch.no_grad()
def hidden(policy: Policy, samples: list[Sample]) -> dict[str, Tensor]:
    """(S, H) the hidden states that predict the tokens of each sequence."""
    found: dict[str, Tensor] = {}
    for m in microbatches(policy, samples):
        found |= by_sequence(policy.hidden(m)[m.sources_P][m.predictions_S], m)
    return found


def by_sequence(values_S: Tensor, m: Microbatch) -> dict[str, Tensor]:
    """Values of loss tokens by their sequence."""
    return {name: values_S[m.trajectories_S == i] for i, name in enumerate(m.trajectory_ids)}


def joined(found: dict[str, Tensor]) -> Tensor:
    """All sequences, one after another in one order, however they were computed."""
    return torch.cat([found[name] for name in sorted(found)])


def compare(report: harness.Report, model: str, folder: Path, world: World) -> None:
    """Measure how far packed logprobs and gradients are from those of each sequence alone."""
    samples = group(*UNEVEN)
    logprobs, states, gradients = {}, {}, {}
    for variant in ("unpacked", "packed", "without_states"):
        policy = load(folder, world, variant)
        states[variant] = joined(hidden(policy, samples))
        logprobs[variant] = joined(passes(policy, samples))
        gradients[variant] = torch.cat([p.grad.flatten() for _, p in policy.trainable() if p.grad is not None])
    for variant in ("packed", "without_states"):
        nats = (logprobs[variant] - logprobs["unpacked"]).abs().max()
        report.add(f"logprobs_apart/{model}/{variant}", [nats.item()], "nats")
        gaps_S, sizes_S = (states[variant] - states["unpacked"]).norm(dim=1), states["unpacked"].norm(dim=1)
        report.add(f"hidden_apart/{model}/{variant}", [(gaps_S.max() / sizes_S.max()).item()], "of its size")
        off = (gradients[variant] - gradients["unpacked"]).norm() / gradients["unpacked"].norm()
        report.add(f"gradient_apart/{model}/{variant}", [off.item()], "of its size")


def measure(
    report: harness.Report, model: str, folder: Path, shape: tuple[int, int, int], rounds: int, world: World
) -> None:
    """Time the passes of one group, packed and unpacked."""
    prompt, branches, tokens = shape
    samples = group(prompt, (tokens,) * branches)
    policies = {variant: load(folder, world, variant) for variant in ("unpacked", "packed")}
    times = harness.interleave({v: partial(seconds, policy, samples) for v, policy in policies.items()}, rounds)
    report.compare(f"seconds/{model}/{named(shape)}", times, "s", "packed")


def seconds(policy: Policy, samples: list[Sample]) -> float:
    """The time of the passes of one group."""
    start = time.perf_counter()
    passes(policy, samples)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
