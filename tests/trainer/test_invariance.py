"""Loss and gradients do not depend on how a step is carried out: 1e-5, relative, float32, of each parameter by itself.

The first step is compared with the same one padded, by transformers in float64 and in float32, and with the trainer's
own, uncut. Steps that follow others, and of other algorithms, are compared with the uncut one of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from folders import read_part
from long_tailed import long_tailed, paid
from plain import load_plain, padded_loss
from ranks import run_ranks
from safetensors.torch import load_file
from steps import ALGORITHMS, ALLOWED, CASES, NO_CLIP, WHOLE, Computed, Run, apart, assert_close
from support import save_tiny_model
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint import Checkpoint
from agentrl.trainer.distributed import World
from agentrl.trainer.packing import Sample

Start = Callable[..., Run]
Batches = list[list[TrajectoryTokens]]
LAST = "critic-reference-adapter"
COMMON = ("grpo", LAST)
"""The cases that `make test` resumes; `make test-long` resumes all."""
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole-unshared": {"sharing": False},
    "parts": {"tokens_per_microbatch": 300},
    "parts-unshared": {"tokens_per_microbatch": 300, "sharing": False},
    "small-parts": {"tokens_per_microbatch": 100},
    "recomputed": {"activation_checkpointing": True},
    "single-trajectories": {"tokens_per_microbatch": 1},
    "unpacked": {"unpacked": True},
    "all-at-once": {"tokens_per_microbatch": 200, "sharing": False, "activation_checkpointing": True},
}
"""How a step is carried out: settings of the trainer, and whether shared prefixes are computed once."""


@pytest.fixture(scope="module")
def batches(tiny_model: Path) -> Batches:
    """Of two steps."""
    return [long_tailed(tiny_model, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def start(tiny_model: Path, other_model: Path, world: World) -> Start:
    """A run in this process, by its settings."""
    return partial(Run, tiny_model, world, other_model)


# -- one step, against transformers --------------------------------------------------------------------------------


class Plain(NamedTuple):
    """Transformers' model, whose parameters have gradients, and the loss."""

    lm: Any
    loss: float

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {f"{name}/0": p.grad for name, p in self.lm.named_parameters()}


def padded(lm: Any, samples: list[Sample], algorithm: str = "grpo") -> Plain:
    """The padded step."""
    loss = padded_loss(lm, samples, Algorithm(**ALGORITHMS[algorithm]))
    loss.backward()  # type: ignore[no-untyped-call]
    return Plain(lm, loss.item())


@pytest.fixture(scope="module")
def expected(tiny_model: Path, start: Start, batches: Batches) -> dict[str, list[Plain | Computed]]:
    """The first step, by algorithm: padded in float64 and in float32, and the trainer's own, uncut."""
    samples = paid(batches[0])
    return {
        name: [
            *(padded(load_plain(tiny_model, dtype), samples, name) for dtype in (torch.float64, torch.float32)),
            start(algorithm=algorithm, grad_clip=NO_CLIP).update(samples),
        ]
        for name, algorithm in ALGORITHMS.items()
    }


def assert_same(found: Computed, expected: Sequence[Plain | Computed]) -> None:
    """Of the gradients those that were computed."""
    for step in expected:
        assert found.loss == pytest.approx(step.loss, rel=ALLOWED)
        assert_close(found.gradients, {name: step.gradients[name] for name in found.gradients}, ALLOWED)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_equals_the_padded_computation(
    start: Start, batches: Batches, expected: dict[str, list[Plain | Computed]], way: str, algorithm: str
) -> None:
    found = start(algorithm=ALGORITHMS[algorithm], grad_clip=NO_CLIP, **WAYS[way]).update(paid(batches[0]))
    assert_same(found, expected[algorithm])
    assert len(found.gradients) == len(expected[algorithm][0].gradients)
    assert bool(found.metrics["clip_fraction"]) == (algorithm == "behavior")
    alone = sum(int(np.flatnonzero(t.loss_mask)[-1]) for t in batches[0])
    shares = WAYS[way].get("sharing", True) and way not in ("single-trajectories", "unpacked")
    assert (found.metrics["tokens_computed"] < alone) == shares


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_layer_trained_alone_has_the_same_gradient_as_in_the_whole_model(
    start: Start, batches: Batches, expected: dict[str, list[Plain | Computed]], algorithm: str
) -> None:
    run = start(algorithm=ALGORITHMS[algorithm], grad_clip=NO_CLIP, train_layers=1)
    assert_same(run.update(paid(batches[0])), expected[algorithm])


def test_an_untied_head_gives_the_padded_computation(tmp_path: Path, world: World) -> None:
    model = save_tiny_model(tmp_path, tied=False)
    samples = paid(long_tailed(model))
    for way in ("whole", "all-at-once"):
        found = Run(model, world, grad_clip=NO_CLIP, **WAYS[way]).update(samples)
        assert_same(found, [padded(load_plain(model), samples)])


def test_a_group_is_trained_whole_when_a_part_of_it_has_an_advantage(start: Start, batches: Batches) -> None:
    samples = paid(batches[0])
    samples[:12] = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples[:12]]  # a group and a half
    whole, parts = (
        start(grad_clip=NO_CLIP, minibatches=2, tokens_per_microbatch=budget).update(samples) for budget in (WHOLE, 100)
    )
    assert_close(parts.gradients, whole.gradients, ALLOWED)


@pytest.mark.parametrize("way", ["whole", "all-at-once"])
def test_weights_and_moments_after_clipping_and_adamw(
    tiny_model: Path, start: Start, batches: Batches, way: str
) -> None:
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    lm = padded(load_plain(tiny_model), paid(batches[0])).lm
    weights = dict(lm.named_parameters())
    assert torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.1) > 0.1
    optimizer = torch.optim.AdamW(lm.parameters(), **settings)
    optimizer.step()
    moments = {f"{name}/{moment}": t for name, p in weights.items() for moment, t in optimizer.state[p].items()}
    found = start(grad_clip=0.1, **settings, **WAYS[way]).update(paid(batches[0]))
    assert_close(found.moments, moments, ALLOWED)
    assert apart(found.weights, weights) <= ALLOWED


# -- a step that follows another, of any algorithm -----------------------------------------------------------------


class Begun(NamedTuple):
    """A run after its first step, and the second step as it makes it without a break."""

    saved: Checkpoint
    then: Computed


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, start: Start, batches: Batches) -> Callable[[str], Begun]:
    """By case."""
    root = tmp_path_factory.mktemp("begun")

    @cache
    def begin(case: str) -> Begun:
        run = start(**CASES[case])
        run.step(batches[0])
        return Begun(run.save(root / case), run.step(batches[1]))

    return begin


def assert_alike(found: Computed, expected: Computed, but: Set[str] = frozenset()) -> None:
    """Gradients, what AdamW made of them, and metrics. Centred advantages are of size 1, and their loss is about 0."""
    assert_close(found.gradients, expected.gradients, ALLOWED)
    assert_close(found.moments, expected.moments, ALLOWED)
    assert apart(found.weights, expected.weights) <= ALLOWED
    for name in expected.metrics.keys() - {"tokens_computed", "flops"} - but:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=ALLOWED, abs=1e-6), name


@pytest.mark.parametrize(
    "case", [name if name in COMMON else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_a_resumed_run_computes_the_same_step(
    start: Start, batches: Batches, begun: Callable[[str], Begun], case: str
) -> None:
    run = start(**CASES[case], **WAYS["all-at-once"])
    run.restore(begun(case).saved)
    assert_alike(run.step(batches[1]), begun(case).then)


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.long) for case in ("gspo", "kl-in-reward")), LAST]
)
def test_an_unpacked_run_computes_the_same_step(
    start: Start, batches: Batches, begun: Callable[[str], Begun], case: str
) -> None:
    run = start(**CASES[case], **WAYS["unpacked"])
    run.restore(begun(case).saved)
    assert_alike(run.step(batches[1]), begun(case).then, {"packed"})


@pytest.mark.parametrize("case", ["grpo", LAST])
def test_the_same_packing_gives_bit_identical_results(
    start: Start, batches: Batches, begun: Callable[[str], Begun], case: str
) -> None:
    run = start(**CASES[case])
    run.restore(begun(case).saved)
    found, expected = run.step(batches[1]), begun(case).then
    assert found.metrics == expected.metrics
    assert_close(found.gradients, expected.gradients, 0)
    assert_close(found.moments, expected.moments, 0)
    assert_close(found.weights, expected.weights, 0)


def test_a_resumed_step_equals_the_padded_computation(
    tiny_model: Path, start: Start, batches: Batches, begun: Callable[[str], Begun]
) -> None:
    saved = begun("grpo").saved
    run, lm = start(grad_clip=NO_CLIP), load_plain(tiny_model)
    run.restore(saved)
    lm.load_state_dict(read_part(saved.folder, "policy", run.world), strict=False)  # the head is tied
    assert_same(run.update(paid(batches[1])), [padded(lm, paid(batches[1]))])


# -- on several ranks ----------------------------------------------------------------------------------------------


def read(folder: Path) -> Computed:
    """What rank_invariance.py wrote."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return Computed(metrics, *(load_file(folder / f"{name}.safetensors") for name in Computed._fields[1:]))


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        pytest.param(2, 1, id="sharded"),
        pytest.param(2, 2, id="replicated", marks=pytest.mark.long),
        pytest.param(4, 2, id="hybrid-gathered", marks=pytest.mark.long),
    ],
)
def test_several_ranks_compute_the_same_step_as_one(
    tiny_model: Path,
    other_model: Path,
    tmp_path: Path,
    start: Start,
    batches: Batches,
    expected: dict[str, list[Plain | Computed]],
    begun: Callable[[str], Begun],
    ranks: int,
    replicas: int,
) -> None:
    cases = list(CASES) if replicas == 1 else ["kl-and-entropy-in-loss", LAST]
    checkpoints = [begun(case).saved.folder for case in cases]
    run_ranks("rank_invariance.py", ranks, tiny_model, other_model, tmp_path, replicas, *checkpoints)
    for algorithm in ALGORITHMS:
        assert_same(read(tmp_path / f"first-{algorithm}"), expected[algorithm])
    for case in cases:
        assert_alike(read(tmp_path / case), begun(case).then)
    alone = start(**CASES[LAST])
    (saved,) = (tmp_path / "saved").iterdir()
    alone.restore(checkpoint_folders.read(saved))
    assert_alike(alone.step(batches[0]), read(tmp_path / "third"))
