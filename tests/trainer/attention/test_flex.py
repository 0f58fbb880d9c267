"""The arguments of GPU kernels for a forest. FlexAttention's forward pass runs on a CPU, uncompiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from agentrl.domain.batching import build_tree
from agentrl.errors import UserError
from agentrl.trainer.attention import flex
from agentrl.trainer.attention.blocks import visible_pairs
from agentrl.trainer.attention.pieces import visible
from agentrl.trainer.attention.split import split_attention
from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.attention.tree_attention import FLEX, SPLIT, name_for, register


def forest(seed: int, count: int = 5, longest: int = 200) -> Tree:
    rng = np.random.default_rng(seed)
    made: list[Any] = []
    for _ in range(count):
        new = rng.integers(0, 50, rng.integers(1, longest))
        if made and rng.random() < 0.6:
            base = made[rng.integers(len(made))]
            new = np.concatenate([base[: rng.integers(1, len(base) + 1)], new])
        made.append(new.astype(np.int32))
    tree = build_tree(made)
    return Tree(tree.ends, tree.positions)


def heads(tree: Tree, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    tokens = len(tree.ends_N)
    q, k, v = (torch.randn(1, h, tokens, 16, generator=gen, dtype=torch.float64).to(dtype) for h in (4, 2, 2))
    return q, k, v


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.none() | st.integers(1, 90), st.integers(1, 70))
def test_blocks_count_the_visible_pairs(seed: int, window: int | None, side: int) -> None:
    tree = forest(seed, longest=60)
    tokens = len(tree.ends_N)
    sees = visible(tree.ends_N, tree.positions_N, window)
    filled = np.zeros((-(-tokens // side) * side,) * 2, np.int64)
    filled[:tokens, :tokens] = sees
    expected = filled.reshape(len(filled) // side, side, -1, side).sum((1, 3))
    found = visible_pairs(tree.pieces(window), lambda piece: tree.sees(piece, window), tokens, side)
    assert (found == expected).all()


@pytest.mark.parametrize("window", [None, 40])
def test_the_block_mask_is_the_one_that_torch_makes_from_the_dense_mask(window: int | None) -> None:
    tree = forest(1)
    tokens = len(tree.ends_N)
    sees = torch.from_numpy(visible(tree.ends_N, tree.positions_N, window))
    expected = create_block_mask(lambda b, h, i, j: sees[i, j], 1, 1, tokens, tokens, device="cpu")
    found = tree.blocks(window)
    whole = tokens // 128 * 128  # torch pads the last block with invisible pairs, too
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert int(found.full_kv_num_blocks.sum()) == int(expected.full_kv_num_blocks.sum()), whole


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_is_split_attention(window: int | None, sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "compiled", lambda: flex_attention)
    tree = forest(2)
    q, k, v = heads(tree)
    sinks_h = torch.randn(4, generator=torch.Generator().manual_seed(1)) if sink else None
    found = flex.flex(q, k, v, tree, window, 0.3, sinks_h)
    torch.testing.assert_close(found, split_attention(q, k, v, tree, window, 0.3, sinks_h), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("takes_groups", [True, False], ids=["groups", "torch before 2.12"])
@pytest.mark.parametrize("window", [None, 7])
def test_sequences_that_share_nothing_are_one_call_of_flash_attention(
    window: int | None, takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel runs on a GPU only. In its place, its definition: causal within each sequence, `window` keys back."""
    from torch.nn.attention import varlen

    calls = []

    def by_definition(
        q_Nhd: Tensor, k_Ngd: Tensor, v_Ngd: Tensor, *lengths: Any, enable_gqa: bool, **options: Any
    ) -> Tensor:
        starts_q, starts_k, longest_q, longest_k = lengths
        assert starts_q is starts_k
        assert starts_q.dtype == torch.int32
        assert longest_q == longest_k == int(starts_q.diff().max())
        calls.append(options["window_size"])
        back, ahead = options["window_size"]
        assert ahead == 0
        out = []
        for a, b in zip(starts_q.tolist()[:-1], starts_q.tolist()[1:], strict=True):
            q, k, v = (x[a:b].transpose(0, 1) for x in (q_Nhd, k_Ngd, v_Ngd))
            i = torch.arange(b - a)
            seen = (i[None, :] <= i[:, None]) & ((i[:, None] - i[None, :] <= back) | (back < 0))
            part = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=options["scale"], enable_gqa=enable_gqa
            )
            out.append(part.transpose(0, 1))
        return torch.cat(out)

    def without_groups(*heads_and_lengths: Any, **options: Any) -> Tensor:
        return by_definition(*heads_and_lengths, enable_gqa=False, **options)

    monkeypatch.setattr(varlen, "varlen_attn", by_definition if takes_groups else without_groups)
    tree = Tree(np.array([5] * 5 + [6] + [40] * 34, np.int32), np.array([*range(5), 0, *range(34)], np.int32))
    q, k, v = heads(tree)
    found = flex.sequences(q, k, v, tree, window, 0.3)
    torch.testing.assert_close(found, split_attention(q, k, v, tree, window, 0.3, None), rtol=1e-5, atol=1e-5)
    assert calls == [(-1 if window is None else window - 1, 0)]


def test_only_sequences_that_share_nothing_are_taken() -> None:
    def on_gpu(dtype: torch.dtype = torch.bfloat16, size: int = 64) -> Any:
        return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 3, size))

    alone = Tree(np.array([1, 3, 3], np.int32), np.array([0, 0, 1], np.int32))
    forked = Tree(np.array([3, 2, 3], np.int32), np.array([0, 1, 1], np.int32))
    assert flex.takes_sequences(on_gpu(), on_gpu(), alone, None)
    assert not flex.takes_sequences(on_gpu(), on_gpu(), forked, None)
    assert not flex.takes_sequences(on_gpu(), on_gpu(), alone, torch.zeros(2))
    assert not flex.takes_sequences(on_gpu(torch.float32), on_gpu(torch.float32), alone, None)
    assert not flex.takes_sequences(on_gpu(size=36), on_gpu(size=36), alone, None)
    assert not flex.takes_sequences(on_gpu(), on_gpu(size=32), alone, None)
    assert not flex.takes_sequences(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16), on_gpu(), alone, None)


def test_the_device_chooses_the_attention_unless_it_is_set() -> None:
    assert [name_for("auto", device) for device in ("cpu", "cuda")] == [SPLIT, FLEX]
    assert [name_for("split", device) for device in ("cpu", "cuda")] == [SPLIT, SPLIT]
    assert name_for("flex", "cuda") == FLEX
    with pytest.raises(UserError, match=r"trainer\.attention: flex needs a GPU"):
        name_for("flex", "cpu")


def test_transformers_calls_flex_attention_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    monkeypatch.setattr(flex, "compiled", lambda: flex_attention)
    register()
    tree = forest(3)
    given_ = (torch.nn.Identity(), *heads(tree), tree.marker)
    found, expected = (AttentionInterface()[name](*given_, tree=tree)[0] for name in (FLEX, SPLIT))
    assert not torch.equal(found, expected)  # another kernel
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
