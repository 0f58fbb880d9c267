"""Attention in pieces equals a softmax over a dense mask, in values and gradients, for every kernel that a CPU has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.domain.batching import PrefixTree, build_tree
from agentrl.trainer.attention import pieces as cutting
from agentrl.trainer.attention import split
from agentrl.trainer.attention.kernels import CPU_FLASH, PRODUCTS, Kernel, kernel_for
from agentrl.trainer.attention.pieces import visible
from agentrl.trainer.attention.split import split_attention
from agentrl.trainer.attention.tree import Tree

HEADS, GROUPS, SIZE, VALUES = 6, 2, 16, 8
ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06}


def forest(seed: int, count: int = 8) -> PrefixTree:
    """Sequences that fork from each other at random places."""
    rng = np.random.default_rng(seed)
    made: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    for _ in range(count):
        new = rng.integers(0, 50, rng.integers(1, 40))
        if made and rng.random() < 0.7:
            base = made[rng.integers(len(made))]
            new = np.concatenate([base[: rng.integers(1, len(base) + 1)], new])
        made.append(new)
    return build_tree([ids.astype(np.int32) for ids in made])


def inputs(tokens: int, dtype: torch.dtype, sink: bool) -> list[Tensor]:
    """Queries, keys, values, the gradient of the output, and sinks."""
    gen = torch.Generator().manual_seed(0)
    shapes = [(HEADS, SIZE), (GROUPS, SIZE), (GROUPS, VALUES), (HEADS, VALUES)]
    made = [torch.randn(1, h, tokens, d, generator=gen, dtype=torch.float64).to(dtype) for h, d in shapes]
    if sink:
        made.append(torch.randn(HEADS, generator=gen, dtype=torch.float64).to(dtype))
    return made


def dense(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, window: int | None, scale: float, sinks_h: Tensor | None
) -> Tensor:
    """The definition: one softmax over all keys, in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    sees = torch.from_numpy(visible(tree.ends_N, tree.positions_N, window))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~sees, -torch.inf)
    if sinks_h is not None:
        column = sinks_h.double()[None, :, None, None].expand(1, -1, scores.shape[2], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def with_gradients(attend: object, given_: Sequence[Tensor], tree: Tree, window: int | None) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    q, k, v, grad, *sinks = (x.detach().clone() for x in given_)
    leaves = [x.requires_grad_() for x in (q, k, v, *sinks)]
    out = attend(q, k, v, tree, window, 0.3, sinks[0] if sinks else None)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_equal(tree: Tree, window: int | None, sink: bool, dtype: torch.dtype) -> None:
    given_ = inputs(len(tree.ends_N), dtype, sink)
    found = with_gradients(split_attention, given_, tree, window)
    expected = with_gradients(dense, given_, tree, window)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert float((a.double() - b.double()).abs().max()) <= ALLOWED[dtype] * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("kernel", [CPU_FLASH, PRODUCTS], ids=["flash", "products"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_a_dense_softmax(
    kernel: Kernel, sink: bool, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "kernel_for", lambda q, masked: kernel)
    monkeypatch.setattr(cutting, "TILE", 8)
    cut = forest(3)
    for small in (0, 16, 256):
        tree = Tree(cut.ends, cut.positions)
        tree._cut = {None: cutting.pieces(tree.chains, small)}
        if window is not None:
            tree._cut[window] = cutting.windowed(tree._cut[None], cut.positions, window, tile=8)
        assert_equal(tree, window, sink, dtype)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.none() | st.integers(1, 40), st.booleans())
def test_any_forest(seed: int, window: int | None, sink: bool) -> None:
    cut = forest(seed)
    assert_equal(Tree(cut.ends, cut.positions), window, sink, torch.float64)


def test_the_products_kernel_bounds_the_scores_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.trainer.attention import kernels

    cut = forest(1)
    given_ = inputs(len(cut), torch.float64, sink=False)
    monkeypatch.setattr(split, "kernel_for", lambda q, masked: PRODUCTS)
    whole = with_gradients(split_attention, given_, Tree(cut.ends, cut.positions), None)
    monkeypatch.setattr(kernels, "SCORES", 64)
    tiled = with_gradients(split_attention, given_, Tree(cut.ends, cut.positions), None)
    for a, b in zip(whole, tiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_gpu_uses_flash_attention_where_it_can() -> None:
    from agentrl.trainer.attention.kernels import GPU_FLASH

    def on_gpu(dtype: torch.dtype) -> Tensor:
        return torch.empty(1, 1, 1, 64, dtype=dtype, device="meta")

    assert kernel_for(on_gpu(torch.bfloat16), masked=False) is GPU_FLASH
    assert kernel_for(on_gpu(torch.bfloat16), masked=True) is PRODUCTS
    assert kernel_for(on_gpu(torch.float32), masked=False) is PRODUCTS
    assert kernel_for(torch.empty(1), masked=True) is CPU_FLASH


def test_a_token_without_other_keys_attends_to_itself_and_its_sink() -> None:
    tree = Tree(np.array([1], np.int32), np.array([0], np.int32))
    q, k, v = (torch.randn(1, HEADS, 1, SIZE) for _ in range(3))
    torch.testing.assert_close(split_attention(q, k, v, tree, None, 1.0, None), v)
    sunk = split_attention(q, k, v, tree, None, 1.0, torch.full((HEADS,), 100.0))
    assert float(sunk.abs().max()) < 1e-6
