"""The load-balancing loss against transformers' own, and loads counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agentrl.trainer.experts.load_balancing import load_balancing_loss, load_metrics, loads
from agentrl.trainer.experts.routers import Choice


@given(st.integers(1, 4), st.integers(1, 30), st.integers(2, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_loss_and_its_gradient_are_those_of_transformers(layers, tokens, experts, top_k, seed) -> None:
    top_k = min(top_k, experts)
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(tokens, experts, generator=generator, requires_grad=True) for _ in range(layers)]
    choices = [Choice(r, experts, one.softmax(-1).topk(top_k).indices, one) for r, one in enumerate(logits)]
    ours, theirs = load_balancing_loss(choices), load_balancing_loss_func(tuple(logits), experts, top_k)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(a, b)


def test_loads_of_several_passes_are_summed_by_router() -> None:
    first, second = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[3, 1]])
    passes = [Choice(0, 4, first, None), Choice(0, 4, second, None), Choice(1, 4, second, None)]
    assert loads(passes).tolist() == [[2, 2, 1, 1], [0, 1, 0, 1]]


def test_metrics_of_an_even_and_of_a_one_sided_load() -> None:
    even, one_sided = [5, 5, 5, 5], [20, 0, 0, 0]
    assert load_metrics(torch.tensor([even, even])) == {
        "routing/load_max": 1.0,
        "routing/load_entropy": pytest.approx(1.0),
        "routing/experts_idle": 0.0,
    }
    found = load_metrics(torch.tensor([even, one_sided, [10, 10, 0, 0]]))
    assert found["routing/load_max"] == pytest.approx((1 + 4 + 2) / 3)
    assert found["routing/load_entropy"] == pytest.approx((1 + 0 + math.log(2) / math.log(4)) / 3)
    assert found["routing/experts_idle"] == pytest.approx((0 + 3 + 2) / 12)
    assert load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {}
