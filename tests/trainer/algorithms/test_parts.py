"""Every value of every part of the loss against a token-by-token computation in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from padded import Padded, random_batch
from part_values import levels_and_clips, values
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.aggregation import Totals, token_weights
from agentrl.trainer.algorithms.clipping import SURROGATES
from agentrl.trainer.algorithms.corrections import (
    behavior_weights,
    interpolated_proximal,
    second_moment_limit,
    under_limit,
)
from agentrl.trainer.algorithms.gae import gae, value_losses
from agentrl.trainer.algorithms.kl import adapted, kl_divergence
from agentrl.trainer.algorithms.losses import LossTokens, policy_loss
from agentrl.trainer.algorithms.packed_rows import Rows

LEVELS = values("ratio")


def by_hand(b: Padded, a: Algorithm) -> Tensor:
    """One token after the other; autograd only for its log π."""
    total = torch.zeros((), dtype=torch.float64)
    sequences = int(b.mask.any(1).sum())
    for r in range(len(b.mask)):
        own = [t for t in range(b.mask.shape[1]) if b.mask[r, t]]
        for t in own:
            peers = {
                "token": [t],
                "turn": [u for u in own if b.turns[r, u] == b.turns[r, t]],
                "sequence": own,
                "product": own,
            }
            log_ratios = [b.logprobs[r, u] - b.proximal[r, u] for u in peers[a.ratio]]
            if a.ratio == "product":
                rho = torch.exp(sum(log_ratios))
            elif a.ratio == "token":
                rho = torch.exp(log_ratios[0])
            else:
                assert a.ratio in ("turn", "sequence"), f"no formula for ratio {a.ratio}"
                value = math.exp(sum(x.item() for x in log_ratios) / len(log_ratios))
                rho = value * torch.exp(b.logprobs[r, t]) / math.exp(b.logprobs[r, t].item())
            gaps = [(b.proximal[r, u] - b.behavior[r, u]).item() for u in peers[a.correction_level]]
            w = math.exp(sum(gaps) / (1 if a.correction_level == "product" else len(gaps)))
            inside = a.correction_floor <= w <= a.correction_cap
            w = {"truncate": min(w, a.correction_cap), "mask": w * inside, "reject": float(inside), "none": 1.0}[
                a.correction
            ]
            adv = b.advantages[r, t].item()
            if a.clip == "geometric":
                loss = (
                    w
                    * -adv
                    * geometric_mean(
                        [bounded(b.logprobs[r, u] - b.proximal[r, u], b.advantages[r, u], a) for u in own], own.index(t)
                    )
                )
            else:
                loss = w * surrogate(rho, b.logprobs[r, t], adv, a)
            d = b.logprobs[r, t] - b.reference[r, t]
            assert a.kl in ("loss", "reward"), f"no formula for kl {a.kl}"
            if a.kl == "loss":
                x = d.item()
                straight = {"k1+": x, "k3+": math.exp(-x) - 1 + x}.get(a.kl_estimator, 0.0) - x * x / 2 + d * d / 2
                estimators = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}
                loss = loss + a.kl_coef * estimators.get(a.kl_estimator, straight)
            loss = loss - a.entropy_coef * b.entropy[r, t]
            total = (
                total
                + loss
                / {
                    "token_mean": int(b.mask.sum()),
                    "sequence_mean": sequences * len(own),
                    "sequence_sum": sequences,
                    "constant": sequences * a.aggregation_tokens,
                }[a.aggregation]
            )
    return total


def bounded(log_ratio: Tensor, adv: Tensor, a: Algorithm) -> Tensor:
    """GMPO's clip of one token: only the bound that the advantage pushes towards."""
    if adv >= 0:
        return log_ratio if log_ratio < a.clip_high else torch.tensor(a.clip_high, dtype=torch.float64)
    return log_ratio if log_ratio > -a.clip_low else torch.tensor(-a.clip_low, dtype=torch.float64)


def geometric_mean(log_ratios: list[Tensor], own: int) -> Tensor:
    """In token form: the value of the trajectory's mean, the gradient of the token's own ratio."""
    value = math.exp(sum(x.item() for x in log_ratios) / len(log_ratios))
    return value * torch.exp(log_ratios[own]) / math.exp(log_ratios[own].item())


def surrogate(rho: Tensor, logprob: Tensor, adv: float, a: Algorithm) -> Tensor:
    """By cases instead of by max."""
    low, high = 1 - a.clip_low, 1 + a.clip_high
    if a.clip == "cispo":
        return -min(max(rho.item(), low), high) * adv * logprob
    if a.clip == "sapo":
        tau = a.sapo_tau_positive if adv > 0 else a.sapo_tau_negative
        return -adv * (4 / tau) / (1 + torch.exp(-tau * (rho - 1)))
    if a.clip == "none":
        return -adv * rho
    if a.clip == "reinforce":
        return -adv * logprob
    if a.clip == "tapered":
        return -adv * logprob * (1.0 if adv >= 0 else min(rho.item(), 1.0))
    assert a.clip == "ppo", f"no formula for clip {a.clip}"
    if adv >= 0:
        return -adv * (rho if rho < high else torch.tensor(high))
    if a.dual_clip is not None and rho > a.dual_clip:
        return -adv * torch.tensor(a.dual_clip)
    return -adv * (rho if rho > low else torch.tensor(low))


VARIANTS: list[dict[str, Any]] = [
    *({"ratio": level, "clip": clip} for level, clip in levels_and_clips()),
    {"clip": "geometric", "clip_low": 0.1, "clip_high": 0.3, "correction_level": "sequence"},
    *(
        {"correction": c, "correction_level": level, "correction_cap": 1.5}
        | ({} if c == "truncate" else {"correction_floor": 0.4})
        for c, level in itertools.product([c for c in values("correction") if c != "none"], values("correction_level"))
    ),
    {"correction": "none"},
    {"dual_clip": 1.3, "clip_high": 0.1},
    {"dual_clip": 1.3, "clip_high": 0.1, "ratio": "sequence"},
    {"clip_low": 0.05, "clip_high": 0.5},
    {"sapo_tau_positive": 2.0, "sapo_tau_negative": 0.7, "clip": "sapo"},
    *({"kl_coef": 0.3, "kl_estimator": k} for k in values("kl_estimator")),
    *({"kl_coef": 0.3, "kl": kl} for kl in values("kl") if kl != "loss"),  # `reward`: it is in the advantages already
    *({"aggregation": how, "kl_coef": 0.1, "entropy_coef": 0.2} for how in values("aggregation")),
    {"aggregation": "constant", "aggregation_tokens": 7},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parts", VARIANTS, ids=lambda parts: "-".join(map(str, parts.values())))
def test_loss_and_gradients_equal_the_loop(parts: dict[str, Any], seed: int) -> None:
    algorithm, batch = Algorithm(**parts), random_batch(seed)
    wanted = (batch.logprobs, batch.entropy)
    expected = by_hand(batch, algorithm)
    loss, _ = batch.loss(algorithm)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-12)
    for got, want in zip(gradients(loss, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)


def gradients(loss: Tensor, of: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True))


def test_metrics_count_what_the_bounds_changed() -> None:
    algorithm, batch = Algorithm(correction_cap=1.5), random_batch(3)
    _, sums = batch.loss(algorithm)
    rho = torch.exp(batch.logprobs - batch.proximal)
    bound = ((batch.advantages > 0) & (rho > 1.2)) | ((batch.advantages < 0) & (rho < 0.8))
    w = torch.exp(batch.proximal - batch.behavior)
    off = batch.logprobs - batch.behavior
    expected = {
        "clip_fraction": (bound & batch.mask).sum().item(),
        "behavior_weight": w.clamp(max=1.5)[batch.mask].sum().item(),
        "behavior_weight_capped": ((w > 1.5) & batch.mask).sum().item(),
        "approx_kl": (torch.exp(off) - 1 - off)[batch.mask].sum().item(),
    }
    assert {name: sums[name].item() for name in expected} == pytest.approx(expected)
    assert all(value > 0 for value in expected.values())


@pytest.mark.parametrize("kl", values("kl"))
def test_the_divergence_from_the_reference_is_reported_wherever_it_counts(kl: Any) -> None:
    batch = random_batch(3)
    _, sums = batch.loss(Algorithm(kl_coef=0.3, kl=kl, kl_estimator="k1"))
    assert sums["kl_reference"].item() == pytest.approx((batch.logprobs - batch.reference)[batch.mask].sum().item())


NEVER = [False] * 6


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # (ratio, advantage):  (2, 1)  (.5, 1)  (.5, −1)  (2, −1)  (3, −1)  (4, −1)
        ({"clip": "ppo"}, [True, False, True, False, False, False]),
        ({"clip": "ppo", "dual_clip": 3.0}, [True, False, True, False, False, True]),
        ({"clip": "cispo"}, [True] * 6),
        ({"clip": "cispo", "clip_low": 0.6, "clip_high": 2.5}, [False, False, False, False, False, True]),
        ({"clip": "sapo"}, NEVER),
        ({"clip": "geometric"}, [True, False, True, False, False, False]),
        ({"clip": "tapered"}, [False, False, False, True, True, True]),
        ({"clip": "reinforce"}, NEVER),
        ({"clip": "none"}, NEVER),
    ],
    ids=str,
)
def test_a_token_is_clipped_where_a_bound_changes_its_loss(parts: dict[str, Any], expected: list[bool]) -> None:
    ratio, advantages = torch.tensor([2.0, 0.5, 0.5, 2.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    algorithm = Algorithm(**{"clip_low": 0.2, "clip_high": 0.2} | parts)
    rows = Rows(torch.arange(6), 6)
    _, clipped = SURROGATES[algorithm.clip](ratio, torch.zeros(6), advantages, rows, algorithm)
    assert clipped.dtype == torch.bool
    assert clipped.tolist() == expected


def test_without_a_correction_no_token_is_weighted_or_out_of_bounds() -> None:
    rows, proximal = Rows(torch.zeros(3, dtype=torch.int64), 1), torch.tensor([-1.0, -5.0, -30.0])
    weights, outside = behavior_weights(proximal, torch.zeros(3), rows, rows, Algorithm(correction="none"))
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert outside.dtype == torch.bool
    assert not outside.any()


@pytest.mark.parametrize(
    "parts",
    [
        {"correction": "truncate", "correction_cap": 1.0},
        *({"correction": how, "correction_cap": 1.0, "correction_floor": 0.5} for how in ("mask", "reject")),
        *({"correction": how, "correction_cap": 2.0, "correction_floor": 1.0} for how in ("mask", "reject")),
    ],
    ids=str,
)
def test_a_weight_at_a_bound_is_within_it(parts: dict[str, Any]) -> None:
    """A weight on policy is 1."""
    rows, logprobs = Rows(torch.zeros(2, dtype=torch.int64), 1), torch.tensor([-1.0, -2.0])
    weights, outside = behavior_weights(logprobs, logprobs, rows, rows, Algorithm(**parts))
    assert weights.tolist() == [1.0, 1.0]
    assert not outside.any()


def test_on_policy_the_gradient_is_plain_policy_gradient_for_every_ratio() -> None:
    batch = random_batch(0, whole_trajectories=True)
    batch.proximal[:] = batch.behavior[:] = batch.logprobs.detach()
    plain = (-batch.advantages * batch.logprobs * batch.mask).sum() / batch.totals.sequences
    (expected,) = torch.autograd.grad(plain, batch.logprobs)
    for level in ("token", "turn", "sequence"):
        loss, sums = batch.loss(Algorithm(ratio=level, aggregation="sequence_sum"))
        torch.testing.assert_close(torch.autograd.grad(loss, batch.logprobs)[0], expected)
        assert sums["approx_kl"].item() == 0
    loss, _ = batch.loss(Algorithm(preset="rloo"))  # the mean of one and the same value is not divided by the length
    torch.testing.assert_close(torch.autograd.grad(loss, batch.logprobs)[0], expected)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("clip", values("clip"))
def test_a_long_trajectory_that_is_far_off_has_a_finite_loss(clip: str, advantage: float) -> None:
    one = torch.zeros(500, dtype=torch.int64)
    logprobs = torch.zeros(500, requires_grad=True)
    tokens = LossTokens(
        logprobs_S=logprobs,
        proximal_S=torch.full((500,), -1.0),
        behavior_S=torch.full((500,), -2.0),
        advantages_S=torch.full((500,), advantage),
        trajectories=Rows(one, 1),
        turns=Rows(one, 1),
    )
    ratio = "product" if ("product", clip) in levels_and_clips() else "token"
    algorithm = Algorithm(ratio=ratio, correction_level="product", clip=clip)
    loss, sums = policy_loss(tokens, Totals(500.0, 1.0), algorithm)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert sums["behavior_weight_capped"] == 500


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_a_minibatch_of_one_token_has_that_tokens_loss(aggregation: Any) -> None:
    algorithm, row = Algorithm(aggregation=aggregation), Rows(torch.tensor([0]), 1)
    assert token_weights(torch.zeros(1), row, Totals(1.0, 1.0), algorithm).tolist() == [1.0]
    assert token_weights(torch.zeros(0), Rows(row.of_S[:0], 0), Totals(0.0, 0.0), algorithm).tolist() == []


# -- proximal logprobs ---------------------------------------------------------------------------------------------


def test_interpolation_by_version() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    ages = torch.tensor([0, 1, 2, 3])
    at_first = interpolated_proximal(current, behavior, ages, 0.0)
    assert at_first.tolist() == [-1, -1, -1, -1]  # nothing has moved: the current policy is the proximal one
    halfway = interpolated_proximal(current, behavior, ages, 0.5)
    assert halfway.tolist() == pytest.approx([-2, -2 + 1 / 1.5, -2 + 2 / 2.5, -2 + 3 / 3.5])
    a_version_on = interpolated_proximal(current, behavior, ages, 1.0)
    assert a_version_on.tolist() == pytest.approx([-2, -1.5, -2 + 2 / 3, -1.25])  # (v_prox − v_b) / (v − v_b)
    assert not halfway.requires_grad
    farther = interpolated_proximal(current, behavior - 1, ages, 1.0)
    assert farther.tolist() == pytest.approx([-3, -2, -3 + 4 / 3, -1.5])


# -- M2PO's mask ---------------------------------------------------------------------------------------------------


def test_kept_tokens_have_a_second_moment_under_the_threshold() -> None:
    ratios = torch.tensor([0.1, -0.1, 0.3, -0.9, 2.0])
    kept = under_limit(ratios, second_moment_limit(ratios, 0.04))
    assert kept.tolist() == [True, True, True, False, False]  # (0.01 + 0.01 + 0.09) / 3 < 0.04 < with 0.81
    assert second_moment_limit(ratios, 10.0) == math.inf
    assert not under_limit(ratios, second_moment_limit(ratios, 0.001)).any()
    assert second_moment_limit(torch.empty(0), 0.04) == math.inf
    assert second_moment_limit(torch.tensor([0.5, 2.0]), 0.25) == 4.0  # a mean at the threshold stays


def test_equal_tokens_stay_or_leave_together() -> None:
    ratios = torch.tensor([0.1, 0.3, -0.3, 0.3])
    kept = under_limit(ratios, second_moment_limit(ratios, 0.06))  # one or two of the larger ones would fit
    assert kept.tolist() == [True, False, False, False]


# -- KL ------------------------------------------------------------------------------------------------------------


def test_kl_estimators_are_zero_for_the_same_policy_and_k2_k3_never_negative() -> None:
    logprobs, reference = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    for kind in values("kl_estimator"):
        assert not kl_divergence(logprobs, logprobs, kind).any()
    for kind in ("k2", "k3", "k3+"):
        assert (kl_divergence(logprobs, reference, kind) >= 0).all()


def test_kl_estimators_estimate_the_divergence() -> None:
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3", "k1+", "k3+"):  # without bias; k2 is close where the policies are
        torch.testing.assert_close((p * kl_divergence(p.log(), q.log(), kind)).sum(), exact)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_the_gradient_of_these_estimators_is_that_of_the_divergence(kind: Any) -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    log_p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - q.log())).sum(), logits, retain_graph=True)
    estimate = (log_p.exp().detach() * kl_divergence(log_p, q.log(), kind)).sum()  # tokens that π sampled
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], exact)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [(0.02, 0.5), (0.021, 0.5 * 1.005), (0.018, 0.5 * 0.99), (9.0, 0.5 * 1.02), (-1.0, 0.5 * 0.98)],
)
def test_the_controller_moves_the_coefficient_by_the_bounded_relative_error(divergence: float, expected: float) -> None:
    assert adapted(0.5, divergence, target=0.02, gain=0.1) == pytest.approx(expected)


def test_the_controller_keeps_the_coefficient_within_its_bound() -> None:
    assert adapted(1e6, 9.0, target=0.02, gain=1.0) == 1e6


# -- the critic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_sum_of_discounted_errors(seed: int, gamma: float, lambda_: float) -> None:
    batch = random_batch(seed)
    rows = batch.packed(Algorithm()).trajectories
    rewards, values = batch.advantages, batch.proximal  # any numbers
    advantages, targets = gae(rewards[batch.mask], values[batch.mask], rows, gamma, lambda_)
    expected = []
    for r in range(len(batch.mask)):
        own = [t for t in range(9) if batch.mask[r, t]]
        for i in range(len(own)):
            a = 0.0
            for k in range(i, len(own)):
                following = values[r, own[k + 1]].item() if k + 1 < len(own) else 0.0
                delta = rewards[r, own[k]].item() + gamma * following - values[r, own[k]].item()
                a += (gamma * lambda_) ** (k - i) * delta
            expected.append(a)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages.dtype == values.dtype
    torch.testing.assert_close(targets, advantages + values[batch.mask])
    if gamma == lambda_ == 1:  # then the target is the return
        torch.testing.assert_close(targets[-1], rewards[batch.mask][-1])


def test_gae_of_two_tokens_and_of_one() -> None:
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    together, apart = Rows(torch.tensor([0, 0]), 1), Rows(torch.tensor([0, 1]), 2)
    assert gae(rewards, values, together, 0.9, 0.8)[0].tolist() == pytest.approx([0.45 - 0.5 + 0.72 * 0.5, 0.5])
    assert gae(rewards, values, apart, 0.9, 0.8)[0].tolist() == pytest.approx([-0.5, 0.5])
    assert gae(rewards[1:], values[1:], Rows(torch.tensor([0]), 1), 0.9, 0.8)[0].tolist() == pytest.approx([0.5])


def test_gae_of_an_empty_batch_is_empty() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    advantages, targets = gae(empty, empty, Rows(torch.empty(0, dtype=torch.int64), 0), 1.0, 1.0)
    assert len(advantages) == len(targets) == 0


def test_the_value_loss_by_hand() -> None:
    values = torch.tensor([0.0, 1.0, 1.0], requires_grad=True)
    old, targets = torch.tensor([0.0, 0.5, 0.5]), torch.tensor([1.0, 0.0, 2.0])
    assert value_losses(values, old, targets, None).tolist() == [0.5, 0.5, 0.5]
    clipped = value_losses(values, old, targets, 0.2)  # near: 0, 0.7, 0.7
    assert clipped.tolist() == pytest.approx([0.5, 0.5, 1.3**2 / 2])
    clipped.sum().backward()
    assert values.grad.tolist() == [-1.0, 1.0, 0.0]  # one that has moved too far towards its target stays


def test_a_value_that_fell_too_far_from_its_old_one_is_clipped_too() -> None:
    values, old, targets = torch.tensor([0.0, -1.0]), torch.tensor([0.5, 0.5]), torch.tensor([-1.0, 1.0])
    assert value_losses(values, old, targets, 0.2).tolist() == pytest.approx([1.3**2 / 2, 2.0])  # near: 0.3 both
