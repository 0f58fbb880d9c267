"""Buckets and digests of the tensors of a version."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import hypothesis.strategies as st
import torch
from hypothesis import given

from agentrl.trainer.publish.tensor_buckets import digests, in_buckets


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40))
def test_buckets_keep_the_order_and_are_filled_up_to_the_limit(sizes: list[int], room: int) -> None:
    tensors = {str(i): torch.zeros(size) for i, size in enumerate(sizes)}
    buckets = in_buckets(tensors, 4 * room)
    assert [name for bucket in buckets for name in bucket] == list(tensors)
    held = [[t.nbytes for t in bucket.values()] for bucket in buckets]
    assert all(sum(sizes) <= 4 * room or len(sizes) == 1 for sizes in held)
    assert all(sum(a) + b[0] > 4 * room for a, b in pairwise(held))


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def test_digests_cover_the_tensors_that_engines_keep() -> None:
    q, k, v, up, head = (torch.randn(3, 2) for _ in range(5))
    norm, embedding = torch.randn(4), torch.randn(64, 2)
    layer = "model.layers.0"
    found = digests(
        {
            f"{layer}.self_attn.q_proj.weight": q,
            f"{layer}.self_attn.k_proj.weight": k,
            f"{layer}.self_attn.v_proj.weight": v,
            f"{layer}.mlp.up_proj.weight": up,
            "model.norm.weight": norm,
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": head,
        }
    )
    assert found == {
        f"{layer}.self_attn.qkv_proj.weight": sha(q, k, v),
        "model.norm.weight": sha(norm),
        "model.embed_tokens.weight": sha(embedding),
    }


def test_tensors_of_another_type_than_the_engines_are_not_compared() -> None:
    """Engines may keep them in either."""
    tensors = {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16), "norm.weight": torch.ones(4)}
    assert digests(tensors, torch.bfloat16) == {"a.weight": hashlib.sha256(b"\x80\x3f" * 16).hexdigest()[:16]}
