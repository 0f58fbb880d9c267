"""Divergences from a teacher against autograd in float64, and against TRL's and verl's own functions."""

from __future__ import annotations
import __future__ as annotations_only

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from part_values import values
from thoroughness import examples
from torch import Tensor
from torch.nn import functional

from agentrl.trainer.algorithms.vocabulary_divergence import DIVERGENCES, recorded_kl

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


def recorded(seed: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, the teacher's likeliest tokens with some rows shorter than others, and all of its logprobs."""
    own, other = logits(seed)
    log_q = torch.log_softmax(other, -1)
    found, ids = log_q.topk(width)
    short = torch.arange(6)[:, None] + torch.arange(width) > 5 + width // 2
    return own, torch.where(short, -1, ids), torch.where(short, torch.nan, found), log_q


def buckets(own: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """(C,) Σ q log(q / p) over the known tokens and the others as one, row by row, from probabilities."""
    rows = []
    for z, row, q in zip(own, ids.tolist(), log_q.exp(), strict=True):
        known = [i for i in row if i >= 0]
        others = [i for i in range(len(z)) if i not in known]
        p = torch.softmax(z, -1)
        pairs = [(q[i], p[i]) for i in known] + ([(q[others].sum(), p[others].sum())] if others else [])
        rows.append(torch.stack([a * (a / b).log() for a, b in pairs]).sum())
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 4, 11])
def test_a_divergence_from_recorded_tokens_equals_autograd(width: int, seed: int) -> None:
    own, ids, known, log_q = recorded(seed, width)
    found, slope = recorded_kl(own.detach(), ids, known)
    expected = buckets(own, ids, log_q)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), own)[0], rtol=1e-9, atol=1e-11)
    whole, _ = DIVERGENCES["forward"](torch.log_softmax(own.detach(), -1), log_q)
    assert (found <= whole + 1e-12).all()
    single, flat = recorded_kl(own.detach().float(), ids, known.float())
    torch.testing.assert_close(single.double(), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat.double(), slope, rtol=1e-5, atol=1e-6)


def test_all_tokens_recorded_give_the_whole_divergence() -> None:
    own, other = logits(1)
    log_q = torch.log_softmax(other, -1)
    ids = torch.arange(11).flip(0).expand(6, 11)
    found, slope = recorded_kl(own.detach(), ids, log_q.gather(1, ids))
    whole, expected = DIVERGENCES["forward"](torch.log_softmax(own.detach(), -1), log_q)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(30))
@given(numbers, numbers, st.integers(1, 5), st.floats(-1e-3, 1e-3))
def test_a_divergence_from_recorded_tokens_is_finite_and_not_negative(
    own: list[float], other: list[float], width: int, error: float
) -> None:
    """Also of recorded logprobs that are off, so that their probabilities have a sum above 1."""
    log_q, ids = torch.log_softmax(torch.tensor([other]), -1).topk(width)
    found, slope = recorded_kl(torch.tensor([own]), ids, log_q + error)
    assert torch.isfinite(found).all()
    assert torch.isfinite(slope).all()
    assert found.item() >= -1e-3
    assert abs(slope.sum().item()) < 1e-3  # logits have a free constant


def verls() -> Callable[..., dict[str, Tensor]]:
    """`compute_forward_kl_topk`, taken out of its file, since importing that needs other packages."""
    root = Path(__file__).parents[3]
    file = next(root.glob(".venv-verl/lib/python*/site-packages/verl/trainer/distillation/fsdp/losses.py"), None)
    if file is None:
        pytest.skip("no .venv-verl: run `make setup-verl`")
    found = [
        node
        for node in ast.parse(file.read_text()).body
        if getattr(node, "name", "") in ("kl_divergence", "compute_forward_kl_topk")
    ]
    names: dict[str, Any] = {"torch": torch, "F": functional, "get_ulysses_sequence_parallel_world_size": lambda: 1}
    flags = annotations_only.annotations.compiler_flag
    exec(compile(ast.Module(found, []), str(file), "exec", flags=flags, dont_inherit=True), names)
    return names["compute_forward_kl_topk"]


@pytest.mark.parametrize("seed", range(3))
def test_verls_divergence_of_the_likeliest_tokens_is_ours_without_the_others(seed: int) -> None:
    own, ids, known, _ = recorded(seed, 1)
    theirs = verls()(
        own.detach().float()[None],
        torch.nested.as_nested_tensor([known.float()], layout=torch.jagged),
        torch.nested.as_nested_tensor([ids], layout=torch.jagged),
        SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None)),
        "thd",
    )
    found, _ = recorded_kl(own.detach(), ids, known)
    rest_q, rest_p = 1 - known.exp().sum(-1), 1 - torch.softmax(own.detach(), -1).gather(1, ids).sum(-1)
    head = found - rest_q * (rest_q / rest_p).log()
    torch.testing.assert_close(head, theirs["distillation_losses"][0].double(), rtol=1e-5, atol=1e-6)
