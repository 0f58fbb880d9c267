"""The variants of benchmarks/trainer.py do the same work: the same step from the same weights, TRL's included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training.batches import QUICK, Shape, count, lengths, make_samples, rows_within
from training.clock import Clock, peak_bytes
from training.models import save_random_model
from training.trl_grpo import TRL, is_available
from training.trl_grpo import rectangle as trl_rectangle
from training.variants import Ours, Padded, Setting, Variant
from training.worker import Order, one_of_each_group

from agentrl.trainer.distributed import World

CPU = torch.device("cpu")
BUDGET = 64
"""Small enough that every minibatch takes several forward passes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), tiny=True)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What it adds to the weights is the gradient: AdamW's first step would be its sign."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("peer", ["padded", "trl", "trl_tuned"])
def test_every_implementation_computes_the_same_step(model: Path, world: World, peer: str, name: str) -> None:
    shape = QUICK[name]
    if peer.startswith("trl") and not is_available():
        pytest.skip("TRL cannot be imported: run `make setup-trl`")
    setting = Setting(model, minibatches=2, budget=BUDGET, group_size=shape.group_size, make_optimizer=sgd)
    samples = make_samples(shape, 259)
    before = load_file(model / "model.safetensors")
    ours = Ours(setting, world)
    other: Variant = Padded(setting, CPU) if peer == "padded" else TRL(setting, samples, CPU, tuned=peer == "trl_tuned")
    assert other.update(samples) == pytest.approx(ours.update(samples), rel=1e-4)
    mine, theirs = ours.weights(), other.weights()
    assert mine.keys() == theirs.keys() == before.keys()
    moved = torch.cat([(mine[name] - before[name]).flatten() for name in mine])
    apart = torch.cat([(mine[name] - theirs[name]).flatten() for name in mine])
    assert moved.abs().max() > 1e-3
    assert apart.abs().max() < 1e-4 * moved.abs().max()


@pytest.mark.skipif(not is_available(), reason="TRL cannot be imported: run `make setup-trl`")
def test_trl_computes_the_same_warm_up_step(model: Path, world: World) -> None:
    shape = QUICK["even"]
    samples = make_samples(shape, 259)
    few = one_of_each_group(samples)
    setting = Setting(model, budget=1000, group_size=shape.group_size, make_optimizer=sgd)
    ours, trl = Ours(setting, world), TRL(setting, samples, CPU)
    assert len(few) == 2
    assert trl.update(few) == pytest.approx(ours.update(few), rel=1e-4)
    theirs = trl.weights()
    for name, weight in ours.weights().items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-5)


def test_tokens_and_padding_are_counted() -> None:
    shared = Shape(groups=2, group_size=3, prompt=10, output=4, shares_prompt=True)
    counts = count(make_samples(shared, 259), 2, 1000)
    assert (counts.tokens, counts.padded, counts.loss_tokens) == (2 * 3 * 14, 2 * 3 * 14, 2 * 3 * 4)
    assert counts.distinct == 2 * (10 + 3 * 3)  # the last output is only predicted

    tails = Shape(groups=2, group_size=3, prompt=10, output=50, sigma=1.0)
    outputs = lengths(tails, np.random.default_rng(0))
    counts = count(make_samples(tails, 259), 2, 1000)
    assert max(outputs) == 50
    assert counts.tokens == 60 + sum(outputs)
    assert counts.padded == 6 * 60
    assert counts.distinct == counts.tokens - 6


@pytest.mark.parametrize(
    ("rows", "width", "budget", "expected"), [(8, 10, 80, 8), (8, 10, 79, 4), (8, 10, 5, 1), (6, 10, 50, 3)]
)
def test_microbatches_of_rows_are_even_and_within_the_budget(rows: int, width: int, budget: int, expected: int) -> None:
    assert rows_within(rows, width, budget) == expected


def test_trls_rectangle_is_padded_on_both_sides() -> None:
    samples = make_samples(QUICK["tails"], 259)
    batch = trl_rectangle(samples, CPU)
    for row, sample in enumerate(samples):
        ids = torch.cat([batch["prompt_ids"][row], batch["completion_ids"][row]])
        mask = torch.cat([batch["prompt_mask"][row], batch["completion_mask"][row]]).bool()
        assert ids[mask].tolist() == sample.tokens.input_ids.tolist()
        assert batch["completion_mask"][row].sum() == sample.tokens.loss_mask.sum()


def test_the_clock_tells_the_passes_apart(model: Path) -> None:
    setting = Setting(model, budget=BUDGET, make_optimizer=sgd)
    variant = Padded(setting, CPU)
    clock = Clock(CPU)
    clock.watch(variant.model)
    backward = torch.Tensor.backward
    with clock.watching(variant.optimizer):
        variant.update(make_samples(QUICK["even"], 259))
    assert set(clock.seconds) == {"recompute", "forward", "backward", "step"}
    assert torch.Tensor.backward is backward
    assert peak_bytes(CPU) > 0


def test_an_order_survives_serialization() -> None:
    order = Order("trl", "/model", QUICK["tails"], 128, 2, "cpu", 2, False)
    assert Order.parse(order.dump()) == order
