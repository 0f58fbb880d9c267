"""Models with recurrent layers, packed along a forest: the numbers and the gradients of each sequence alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import save_family
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps import NO_CLIP, Run, apart, assert_close
from support import VOCABULARY, random_samples
from torch import Tensor

from agentrl.domain.batching import PrefixTree, build_tree
from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.recurrence.carrying import carriers

ISSUED = ["Qwen3.5", "Qwen3-Next", "LFM2"]
KINDS = ["Qwen3.5", "LFM2", "LFM2, experts", "Mamba 2", "Falcon-H1", "Kimi linear"]
"""Of each kind of state a model: the delta rule, convolutions, with a bias, Mamba 2, beside attention, per channel."""
ALLOWED = 1e-4
"""The error of transformers' float32 kernels, which cut a sequence at other places when it starts from a state."""
EXACT = 1e-9
"""The same in float64."""


class Wide:
    """The module torch, except that transformers' files that see it compute in float64 what they do in float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def exact(policy: Policy) -> Iterator[Policy]:
    """The model in float64, also in the places where transformers casts to float32."""
    files = {
        sys.modules[type(m).__module__] for m in policy.lm.modules() if "transformers.models" in type(m).__module__
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for file in files:
            patch.setattr(file, "torch", Wide())
        policy.lm.set_experts_implementation("eager")  # grouped products have no float64
        yield policy.double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture
def load(folder: Path, world: World) -> Callable[..., Policy]:
    """A model of a family, by its name."""

    def loaded(name: str, **settings: Any) -> Policy:
        if not (folder / name).exists():
            save_family(name, folder / name)
        return load_sharded(Policy, folder / name, world.mesh, **settings)

    return loaded


def forest(lists: list[list[int]]) -> PrefixTree:
    return build_tree([np.array(ids, np.int32) for ids in lists])


def packed(policy: Policy, tree: PrefixTree) -> list[Tensor]:
    """(T, H) hidden states of each sequence, of one pass along the forest."""
    hidden_NH = policy.blocks(
        input_ids=torch.from_numpy(tree.token_ids.astype(np.int64))[None],
        position_ids=torch.from_numpy(tree.positions.astype(np.int64))[None],
        attention_mask=(described := Tree(tree.ends, tree.positions)).marker,
        use_cache=False,
        tree=described,
    ).last_hidden_state[0]
    return [hidden_NH[torch.from_numpy(path.astype(np.int64))] for path in tree.paths]


def alone(policy: Policy, lists: list[list[int]]) -> list[Tensor]:
    """The same of each sequence, by transformers' own forward and attention."""
    policy.read("a test asked for it")
    found = [policy.alone(torch.tensor(ids)) for ids in lists]
    policy.read()
    return found


def gradients(policy: Policy, found: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of a random linear function of all hidden states."""
    generator = torch.Generator().manual_seed(0)
    policy.zero_grad()
    sum(((h * torch.randn(h.shape, generator=generator)).sum() for h in found), torch.zeros(())).backward()
    return {name: full(p.grad).clone() for name, p in policy.trainable() if p.grad is not None}


def compare(policy: Policy, lists: list[list[int]], allowed: float) -> None:
    """Hidden states and the whole gradient, relative to the size of both."""
    tree = forest(lists)
    ordered = [tree.token_ids[path].tolist() for path in tree.paths]
    found, expected = packed(policy, tree), alone(policy, ordered)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).detach().norm(dim=-1).max()) <= allowed * float(b.detach().norm(dim=-1).max())
    assert apart(gradients(policy, found), gradients(policy, expected)) <= allowed


def branches() -> list[list[int]]:
    """A prompt of 70 tokens, and answers of 5, 1 and 66."""
    rng = np.random.default_rng(0)
    prompt, *answers = (rng.integers(3, VOCABULARY, n).tolist() for n in (70, 5, 1, 66))
    return [prompt + answer for answer in answers]


@pytest.mark.parametrize("name", ISSUED)
def test_a_prompt_and_its_branches_equal_each_sequence_alone(name: str, load: Callable[..., Policy]) -> None:
    policy = load(name)
    assert not policy.unpacked
    compare(policy, branches(), ALLOWED)


@pytest.mark.parametrize("name", KINDS)
def test_in_float64_any_forest_equals_each_sequence_alone(name: str, load: Callable[..., Policy]) -> None:
    with exact(load(name)) as policy:

        @settings(max_examples=4, deadline=None)
        @given(st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=12), min_size=1, max_size=6))
        @example([[3, 4, 5, 3], [3, 4, 5, 4], [3, 4, 4], [3, 5, 5], [3, 5, 4, 4, 4, 4, 4], [4]])
        @example(branches())
        def equal(lists: list[list[int]]) -> None:
            compare(policy, lists, EXACT)

        equal()


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2"])
def test_a_block_computed_again_reads_the_forest_of_its_own_pass(name: str, load: Callable[..., Policy]) -> None:
    """Two passes are computed before the backward pass of the first."""
    rng = np.random.default_rng(0)
    trees = [forest(rng.integers(3, 5, (4, 12)).tolist()), forest(rng.integers(3, 5, (3, 9)).tolist())]
    found = []
    for again in (True, False):
        policy = load(name, activation_checkpointing=again)
        passes = [packed(policy, tree) for tree in trees]
        found.append(gradients(policy, [h for one in passes for h in one]))
    assert_close(*found, 1e-6)


@pytest.mark.parametrize("settings_", [{"lora": {"rank": 3}}, {"train_layers": 2}, {"algorithm": "ppo"}], ids=str)
@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2"])
def test_a_step_packed_equals_the_step_unpacked(
    name: str, settings_: dict[str, Any], tmp_path: Path, world: World
) -> None:
    folder = save_family(name, tmp_path)
    trajectories = [s.tokens for s in random_samples(3, groups=2, size=3)]
    steps = [
        Run(folder, world, unpacked=unpacked, grad_clip=NO_CLIP, activation_checkpointing=True, **settings_)
        for unpacked in (False, True)
    ]
    assert [bool(run.models.policy.unpacked) for run in steps] == [False, True]
    packed_step, unpacked_step = (run.step(trajectories) for run in steps)
    assert packed_step.loss == pytest.approx(unpacked_step.loss, rel=ALLOWED)
    assert_close(packed_step.gradients, unpacked_step.gradients, ALLOWED)
    assert "flops" not in packed_step.metrics  # which are counted of attention only


def test_without_a_forest_a_layer_is_transformers_own(folder: Path, load: Callable[..., Policy]) -> None:
    from transformers import AutoModelForCausalLM

    policy = load("Qwen3.5")
    lm = AutoModelForCausalLM.from_pretrained(folder / "Qwen3.5", dtype=torch.float32).eval()
    assert len(carriers(lm)) == 3
    ids = list(range(3, 40))
    expected = lm.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    (found,) = alone(policy, [ids])
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)  # other kernels of matrix products


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Mamba 2"])
def test_in_bfloat16_gradients_are_as_close_as_those_of_each_sequence_alone(
    name: str, load: Callable[..., Policy]
) -> None:
    tree = forest(branches())
    ordered = [tree.token_ids[path].tolist() for path in tree.paths]
    plain = load(name)
    expected = gradients(plain, packed(plain, tree))
    errors = []
    for compute in (partial(packed, tree=tree), partial(alone, lists=ordered)):
        rounded = load(name, dtype=torch.bfloat16)
        assert not rounded.unpacked
        found = rounded.within(partial(compute, rounded))
        errors.append(apart(gradients(rounded, found), expected))
    assert errors[0] <= 1.5 * errors[1] <= 0.5
