"""Each preset's loss and gradient against its paper's formula, written out over padded float64 tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from padded import Padded, random_batch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.presets import PRESETS
from agentrl.trainer.algorithms.corrections import second_moment_limit, under_limit
from agentrl.trainer.algorithms.covariance import covariances, largest

SEEDS = range(6)
TOLERANCE = {"rtol": 1e-6, "atol": 1e-12}


def token_mean(loss: Tensor, b: Padded) -> Tensor:
    return (loss * b.mask).sum() / b.mask.sum()


def sequence_mean(loss: Tensor, b: Padded) -> Tensor:
    """Over the sequences that have tokens."""
    rows = b.mask.any(1)
    return ((loss * b.mask).sum(1)[rows] / b.mask.sum(1)[rows]).sum() / rows.sum()


def weight(b: Padded) -> Tensor:
    """What all presets of the decoupled objective share: min(π_prox/π_behave, 5), per token."""
    return torch.clamp(torch.exp(b.proximal - b.behavior), max=5.0)


def clipped(ratio: Tensor, b: Padded, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * b.advantages, torch.clip(ratio, 1 - low, 1 + high) * b.advantages)


def ratio(b: Padded) -> Tensor:
    return torch.exp(b.logprobs) / torch.exp(b.proximal)


def grpo(b: Padded) -> Tensor:
    return sequence_mean(weight(b) * clipped(ratio(b), b, 0.2, 0.2), b)


def dr_grpo(b: Padded) -> Tensor:
    return (weight(b) * clipped(ratio(b), b, 0.2, 0.2) * b.mask).sum() / b.mask.any(1).sum() / 1024


def dapo(b: Padded) -> Tensor:
    return token_mean(weight(b) * clipped(ratio(b), b, 0.2, 0.28), b)


def ppo(b: Padded) -> Tensor:
    return token_mean(weight(b) * clipped(ratio(b), b, 0.2, 0.2), b)


def rloo(b: Padded) -> Tensor:
    """The trajectory is one action: its probability is the product of its tokens'."""
    whole = torch.exp(((b.logprobs - b.proximal) * b.mask).sum(1, keepdim=True))
    return sequence_mean(weight(b) * -whole * b.advantages, b)


def gspo(b: Padded) -> Tensor:
    """One ratio, one clip and one weight per sequence; the advantage is the same for all of its tokens."""
    length = b.mask.sum(1).clamp(min=1)
    s = torch.exp(((b.logprobs - b.proximal) * b.mask).sum(1) / length)
    w = torch.clamp(torch.exp(((b.proximal - b.behavior) * b.mask).sum(1) / length), max=5.0)
    a = (b.advantages * b.mask).sum(1) / length
    rows = b.mask.any(1)
    return (w * -torch.minimum(s * a, torch.clip(s, 1 - 3e-4, 1 + 4e-4) * a))[rows].sum() / rows.sum()


def cispo(b: Padded) -> Tensor:
    off_policy = torch.exp(b.logprobs - b.behavior).detach()
    return token_mean(-torch.clamp(off_policy, max=5.0) * b.advantages * b.logprobs, b)


def sapo(b: Padded) -> Tensor:
    tau = torch.where(b.advantages > 0, 1.0, 1.05)
    gate = 4 / tau / (1 + torch.exp(-tau * (ratio(b) - 1)))
    return sequence_mean(weight(b) * -gate * b.advantages, b)


def kept(b: Padded, threshold: float) -> Tensor:
    """M2PO's mask: throw out the token with the largest (log ρ)² as long as the mean is over the threshold."""
    square = ((b.logprobs - b.behavior) ** 2).detach()
    left = sorted((square[r, c].item(), r.item(), c.item()) for r, c in b.mask.nonzero())
    while left and sum(s for s, _, _ in left) / len(left) > threshold:
        left.pop()
    mask = torch.zeros_like(b.mask)
    for _, r, c in left:
        mask[r, c] = True
    return mask


def m2po(b: Padded) -> Tensor:
    return token_mean(kept(b, 0.04) * -torch.exp(b.logprobs - b.behavior) * b.advantages, b)


def gmpo(b: Padded) -> Tensor:
    """As in the paper: one geometric mean, one advantage and one weight for each sequence."""
    length = b.mask.sum(1).clamp(min=1)
    x = b.logprobs - b.proximal
    x = torch.where(b.advantages >= 0, x.clamp(max=0.4), x.clamp(min=-0.4))
    g = torch.exp((x * b.mask).sum(1) / length)
    w = torch.clamp(torch.exp(((b.proximal - b.behavior) * b.mask).sum(1) / length), max=5.0)
    rows = b.mask.any(1)
    return (w * -g * (b.advantages * b.mask).sum(1) / length)[rows].sum() / rows.sum()


def sequence_sum(loss: Tensor, b: Padded) -> Tensor:
    return (loss * b.mask).sum() / b.mask.any(1).sum()


def of_sums(b: Padded) -> Tensor:
    return sequence_sum(weight(b) * clipped(ratio(b), b, 0.2, 0.2), b)


def gpg(b: Padded) -> Tensor:
    return token_mean(weight(b) * -b.advantages * b.logprobs, b)


def topr(b: Padded) -> Tensor:
    whole = torch.exp(((b.logprobs - b.behavior) * b.mask).sum(1, keepdim=True)).detach()
    taper = torch.where(b.advantages >= 0, 1.0, whole.clamp(max=1.0))
    return sequence_sum(-taper * b.advantages * b.logprobs, b)


def asymre(b: Padded) -> Tensor:
    return token_mean(-b.advantages * b.logprobs, b)


def covariance(b: Padded) -> Tensor:
    own = b.logprobs.detach()[b.mask], b.advantages[b.mask]
    return (b.logprobs.detach() - own[0].mean()) * (b.advantages - own[1].mean())


def drawn(b: Padded) -> Tensor:
    """Of some 35 tokens, the share of 2e-4 is one: the first one that Clip-Cov may take."""
    mask, r = torch.zeros_like(b.mask), ratio(b).detach()
    free = -r * b.advantages >= -torch.clip(r, 0.8, 1.2) * b.advantages
    for row, column in (b.mask & (covariance(b) > 1) & (covariance(b) < 5) & free).nonzero()[:1]:
        mask[row, column] = True
    return mask


def clip_cov(b: Padded) -> Tensor:
    return token_mean(weight(b) * clipped(ratio(b), b, 0.2, 0.2) * ~drawn(b), b)


def kl_cov(b: Padded) -> Tensor:
    far = b.mask & (covariance(b) == covariance(b)[b.mask].max())
    return token_mean(weight(b) * (-ratio(b) * b.advantages + far * (b.logprobs - b.proximal).abs()), b)


FORMULAS: dict[str, Callable[[Padded], Tensor]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "remax": of_sums,
    "reinforce++": ppo,
    "reinforce++-baseline": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "m2po": m2po,
    "gmpo": gmpo,
    "opo": of_sums,
    "gpg": gpg,
    "topr": topr,
    "asymre": asymre,
    "w_reinforce": ppo,
    "pkpo": of_sums,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "gdpo": grpo,
    "gigpo": grpo,
}


def test_every_preset_has_a_formula() -> None:
    assert FORMULAS.keys() == PRESETS.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", FORMULAS)
def test_loss_and_gradient_are_those_of_the_formula(preset: str, seed: int) -> None:
    batch = random_batch(
        seed, whole_trajectories=preset in ("rloo", "gspo", "gmpo"), spread=0.001 if preset == "gspo" else 0.3
    )
    expected = FORMULAS[preset](batch)
    (expected_gradient,) = torch.autograd.grad(expected, batch.logprobs)

    algorithm = Algorithm(preset=preset)
    keep = None
    if algorithm.m2_threshold is not None:
        log_ratio = (batch.logprobs - batch.behavior).detach()
        limit = second_moment_limit(log_ratio[batch.mask], algorithm.m2_threshold)
        keep = under_limit(log_ratio, limit)
        assert 0 < (keep & batch.mask).sum() < batch.mask.sum()
    far = None
    if algorithm.clip_cov:
        keep = ~drawn(batch)
    if algorithm.kl_cov:
        far = torch.zeros_like(batch.mask)
        tokens = batch.packed(algorithm)
        logprobs = tokens.logprobs_S.detach()
        found = covariances(logprobs, tokens.advantages_S, (float(logprobs.mean()), float(tokens.advantages_S.mean())))
        far[batch.mask] = found >= largest(found, algorithm.kl_cov)
        assert far.sum() == 1
    loss, sums = batch.loss(algorithm, keep=keep, far=far)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)

    torch.testing.assert_close(loss, expected, **TOLERANCE)
    torch.testing.assert_close(gradient, expected_gradient, **TOLERANCE)
    assert sums["loss"] == loss
    assert gradient[batch.mask].any()


@pytest.mark.parametrize("preset", FORMULAS)
def test_the_parts_of_a_cut_batch_add_up(preset: str) -> None:
    algorithm, batch = Algorithm(preset=preset), random_batch(1)
    whole, _ = batch.loss(algorithm)
    parts = sum(batch.loss(algorithm, rows)[0] for rows in (slice(0, 1), slice(1, 3), slice(3, 7)))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("preset", FORMULAS)
def test_a_batch_without_loss_tokens_has_loss_zero(preset: str) -> None:
    batch = random_batch(1)
    batch.mask[:] = False
    loss, _ = batch.loss(Algorithm(preset=preset))
    assert loss.item() == 0
    assert loss.requires_grad
