"""Divergences from a teacher against autograd in float64, and against TRL's own function."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from part_values import values
from thoroughness import examples
from torch import Tensor
from torch.nn import functional

from agentrl.trainer.algorithms.vocabulary_divergence import DIVERGENCES

NAMES = values("distill_divergence")
BETAS = {"reverse": 1, "forward": 0, "jensen_shannon": 0.5}


def logits(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    own, other = torch.randn(6, 11, dtype=torch.float64), 2 * torch.randn(6, 11, dtype=torch.float64)
    return own.requires_grad_(), other


def exact(name: str, own: Tensor, other: Tensor) -> Tensor:
    """(C,) from probabilities, not from their logarithms."""
    p, q = torch.softmax(own, -1), torch.softmax(other, -1)
    m = (p + q) / 2
    pairs = {"reverse": [(p, q)], "forward": [(q, p)], "jensen_shannon": [(p, m), (q, m)]}[name]
    return torch.stack([(a * (a / b).log()).sum(-1) for a, b in pairs]).mean(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_divergences_and_derivatives_equal_autograd(name: str, seed: int) -> None:
    own, other = logits(seed)
    found, slope = DIVERGENCES[name](*(torch.log_softmax(z.detach(), -1) for z in (own, other)))
    expected = exact(name, own, other)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), own)[0], rtol=1e-9, atol=1e-12)


def trls() -> Callable[..., Tensor]:
    """`GKDTrainer.generalized_jsd_loss`, taken out of its file, since importing that needs other packages."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "experimental" / "gkd" / "gkd_trainer.py").read_text())
    (found,) = (node for node in ast.walk(tree) if getattr(node, "name", "") == "generalized_jsd_loss")
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list = []
    names: dict[str, Any] = {"torch": torch, "F": functional}
    exec(compile(ast.Module([found], []), "generalized_jsd_loss", "exec"), names)
    return names["generalized_jsd_loss"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_trl_agrees(name: str, seed: int) -> None:
    own, other = logits(seed)
    theirs = trls()(own[None], other[None], beta=BETAS[name], reduction="sum")
    found, slope = DIVERGENCES[name](*(torch.log_softmax(z.detach(), -1) for z in (own, other)))
    torch.testing.assert_close(found.sum(), theirs.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(slope, torch.autograd.grad(theirs, own)[0], rtol=1e-6, atol=1e-9)


numbers = st.lists(st.floats(-200, 200, width=32), min_size=5, max_size=5)


@settings(max_examples=examples(30))
@given(numbers, numbers)
def test_divergences_are_finite_not_negative_and_0_for_the_same_distribution(
    own: list[float], other: list[float]
) -> None:
    log_p, log_q = (torch.log_softmax(torch.tensor([z]), -1) for z in (own, other))
    for name in NAMES:
        found, slope = DIVERGENCES[name](log_p, log_q)
        assert torch.isfinite(found).all()
        assert torch.isfinite(slope).all()
        assert found.item() >= -1e-4
        same, flat = DIVERGENCES[name](log_p, log_p)
        assert abs(same.item()) < 1e-4
        assert flat.abs().max() < 1e-4
