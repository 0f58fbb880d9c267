"""Where verl computes the same quantity, its own function agrees.

Functions are taken out of verl's files (.venv-verl), since importing them needs packages that nothing here does.
"""

from __future__ import annotations
import __future__ as annotations_only

import ast
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from padded import Padded, random_batch
from support import random_trajectory
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.algorithms.advantages import turn_advantages
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.corrections import behavior_weights
from agentrl.trainer.algorithms.covariance import covariances, largest
from agentrl.trainer.algorithms.gae import gae_advantages
from agentrl.trainer.algorithms.kl import adapted, kl_divergence
from agentrl.trainer.algorithms.losses import policy_loss

ROOT = Path(__file__).parents[3]
ALONE = {"proximal": "recompute", "correction": "none"}
SEEDS = range(3)


@cache
def verls() -> dict[str, Any]:
    """The functions and classes of verl's `core_algos`, by name."""
    folder = next(ROOT.glob(".venv-verl/lib/python*/site-packages/verl"), None)
    if folder is None:
        pytest.skip("no .venv-verl: run `make setup-verl`")
    helpers = _read(folder / "utils" / "torch_functional.py", {"torch": torch})
    kinds = {name: type(name, (), {}) for name in ("AlgoConfig", "ActorConfig")}
    names = {"torch": torch, "np": np, "defaultdict": defaultdict, "verl_F": SimpleNamespace(**helpers), **kinds}
    rejection = {"torch": torch, "math": math, "verl_F": SimpleNamespace(**helpers)}
    found = _read(folder / "trainer" / "ppo" / "core_algos.py", names)
    return found | _read(folder / "trainer" / "ppo" / "rollout_corr_helper.py", rejection)


def _read(file: Path, names: dict[str, Any]) -> dict[str, Any]:
    """The functions, plain classes and constants of a file, without their decorators and annotations."""
    found: list[ast.stmt] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.Set):
            found.append(node)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and not node.bases):
            node.decorator_list = []
            found.append(node)
    flags = annotations_only.annotations.compiler_flag
    exec(compile(ast.Module(found, []), str(file), "exec", flags=flags, dont_inherit=True), names)
    return names


# -- losses -----------------------------------------------------------------------------------------------------------


def settings(low: float = 0.2, high: float = 0.2, **policy_loss: Any) -> Any:
    policy = {
        "clip_cov_ratio": None,
        "clip_cov_lb": None,
        "clip_cov_ub": None,
        "kl_cov_ratio": None,
        "ppo_kl_coef": None,
    }
    return SimpleNamespace(
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        policy_loss=SimpleNamespace(**policy | policy_loss),
        global_batch_info={},
    )


def verl_loss(name: str, b: Padded, config: Any, how: str) -> Tensor:
    function = verls()[f"compute_policy_loss_{name}"]
    loss, _ = function(b.proximal, b.logprobs, b.advantages, b.mask.double(), how, config)
    return loss


def batch(seed: int, **options: Any) -> Padded:
    """Without an empty row: verl's GMPO counts it as a sequence."""
    b = random_batch(seed, **options)
    b.mask[0, :2] = True
    return b


def assert_same(ours: Tensor, theirs: Tensor, b: Padded) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    (got,), (want,) = (torch.autograd.grad(loss, b.logprobs, retain_graph=True) for loss in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    assert got.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_gpg_agrees(seed: int) -> None:
    b = batch(seed)
    assert_same(b.loss(Algorithm(preset="gpg", **ALONE))[0], verl_loss("gpg", b, settings(), "token-mean"), b)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", [0.1, 0.8])
def test_verls_gmpo_agrees_where_a_trajectory_has_one_advantage(seed: int, spread: float) -> None:
    b = batch(seed, whole_trajectories=True, spread=spread)
    theirs = verl_loss("geo_mean", b, settings(0.4, 0.4), "seq-mean-token-mean")
    assert_same(b.loss(Algorithm(preset="gmpo", **ALONE))[0], theirs, b)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_kl_cov_agrees(seed: int) -> None:
    b = batch(seed)
    algorithm = Algorithm(preset="kl_cov", kl_cov=0.15, kl_cov_coef=0.7, **ALONE)
    own = b.packed(algorithm)
    logprobs = own.logprobs_S.detach()
    found = covariances(logprobs, own.advantages_S, (float(logprobs.mean()), float(own.advantages_S.mean())))
    far = torch.zeros_like(b.mask)
    far[b.mask] = found >= largest(found, 0.15)
    theirs = verl_loss("kl_cov", b, settings(kl_cov_ratio=0.15, ppo_kl_coef=0.7), "token-mean")
    assert_same(b.loss(algorithm, far=far)[0], theirs, b)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_clip_cov_agrees_where_it_takes_every_token_between_the_bounds(seed: int) -> None:
    b = batch(seed)
    algorithm = Algorithm(preset="clip_cov", **ALONE)
    own = b.packed(algorithm)
    logprobs = own.logprobs_S.detach()
    found = covariances(logprobs, own.advantages_S, (float(logprobs.mean()), float(own.advantages_S.mean())))
    ratio = torch.exp(own.logprobs_S - own.proximal_S).detach()
    bound = -own.advantages_S * ratio.clamp(0.8, 1.2) > -own.advantages_S * ratio
    keep = torch.ones_like(b.mask)
    keep[b.mask] = ~((found > 0.3) & (found < 5.0) & ~bound)
    assert not keep.all()
    theirs = verl_loss("clip_cov", b, settings(clip_cov_ratio=1.0, clip_cov_lb=0.3), "token-mean")
    assert_same(b.loss(algorithm, keep=keep)[0], theirs, b)


REJECTED = {
    "token": ("token_k1", (0.5, 1.6)),
    "sequence": ("seq_mean_k1", (0.7, 1.3)),
    "product": ("seq_sum_k1", (0.3, 2.5)),
}
"""Level of the correction → verl's mode of rejection, and bounds of π_proximal/π_behaviour."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", [("token_mean", "token-mean"), ("sequence_mean", "seq-mean-token-mean")], ids=str)
@pytest.mark.parametrize("level", REJECTED)
def test_verls_rejection_agrees_in_its_denominators(level: Any, how: tuple[Any, str], seed: int) -> None:
    """verl's trainer divides by the tokens that are left, and by all trajectories of the minibatch."""
    b, (mode, (floor, cap)) = batch(seed), REJECTED[level]
    algorithm = Algorithm(
        dual_clip=3.0,
        correction="reject",
        correction_level=level,
        correction_floor=floor,
        correction_cap=cap,
        masked_in_mean="trajectories",
        aggregation=how[0],
    )
    bounds = f"{1 / cap!r}_{1 / floor!r}"  # verl's are of π_behaviour/π_proximal
    left, _ = verls()["compute_rollout_rejection_mask"](b.proximal - b.behavior, b.mask.double(), mode, bounds)
    sizes = {"batch_num_tokens": float(left.sum()), "global_batch_size": float(b.mask.any(1).sum())}
    config = SimpleNamespace(**vars(settings()) | {"get": lambda _, otherwise: otherwise, "global_batch_info": sizes})
    theirs, _ = verls()["compute_policy_loss_vanilla"](b.proximal, b.logprobs, b.advantages, left, how[1], config)

    own = b.packed(algorithm)
    _, outside_S = behavior_weights(own.proximal_S, own.behavior_S, own.trajectories, own.turns, algorithm)
    assert (~outside_S).tolist() == left[b.mask].bool().tolist()
    assert outside_S.any()
    assert level == "token" or (~left.bool() & b.mask).any(1).sum() == (b.mask.any(1) & ~left.any(1)).sum() > 0
    totals = Totals(float((~outside_S).sum()), float(b.mask.any(1).sum()))
    ours, _ = policy_loss(replace(own, counts_S=~outside_S), totals, algorithm)
    assert_same(ours, theirs, b)


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k1+", "k1+"), ("k3+", "k3+")])
def test_verls_estimators_of_the_divergence_agree(ours: Any, theirs: str) -> None:
    b = batch(0)
    functions = verls()
    got, want = kl_divergence(b.logprobs, b.reference, ours), functions["kl_penalty"](b.logprobs, b.reference, theirs)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), b.logprobs)[0] for x in (got, want)))


def test_verls_controller_of_the_divergence_agrees() -> None:
    theirs = verls()["AdaptiveKLController"](0.3, 0.1, 40.0)
    ours = 0.3
    for measured in (0.05, 0.2, 0.1, 0.101, 3.0):
        theirs.update(measured, 4)
        ours = adapted(ours, measured, 0.1, 4 / 40)
        assert ours == pytest.approx(theirs.value, rel=1e-12)


# -- advantages -------------------------------------------------------------------------------------------------------


def groups(seed: int, sizes: tuple[int, ...] = (4, 3, 5, 2)) -> list[TrajectoryTokens]:
    """Episodes of one call, of 1 to 6 tokens, with two named rewards that add up; one group is tied."""
    rng, found = np.random.default_rng(seed), []
    for g, size in enumerate(sizes):
        for e in range(size):
            right, form = (0.5, 0.25) if g == 1 else (float(rng.integers(2)), float(rng.normal()))
            t = random_trajectory(rng, [3, 4], group=f"g{g}", name=f"e{e}", turns=1, output=int(rng.integers(1, 7)))
            total = np.array([right + form], np.float64)
            named = {"right": right, "form": form}
            found.append(replace(t, turn_returns=total, episode_return=right + form, named_returns=named))
    return found


def padded(batch: list[TrajectoryTokens]) -> dict[str, Any]:
    """As verl's estimators take them: the reward at the last token of each response."""
    lengths = [int(t.loss_mask.sum()) for t in batch]
    mask = torch.tensor([[i < n for i in range(8)] for n in lengths]).double()
    rewards = torch.zeros(len(batch), 8, dtype=torch.float64)
    for i, (t, n) in enumerate(zip(batch, lengths, strict=True)):
        rewards[i, n - 1] = t.episode_return
    return {"token_level_rewards": rewards, "response_mask": mask, "index": np.array([t.group_id for t in batch])}


def compare(batch: list[TrajectoryTokens], algorithm: Algorithm, theirs: Tensor, tolerance: float = 1e-6) -> None:
    """verl's advantages (B, T) have one value for each response."""
    ours = [a.item() for a in turn_advantages(batch, algorithm)]
    assert ours == pytest.approx(theirs[:, 0].tolist(), rel=tolerance, abs=tolerance)
    assert any(ours)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_opo_agrees(seed: int) -> None:
    batch = groups(seed)
    theirs, _ = verls()["compute_opo_outcome_advantage"](**padded(batch))
    compare(batch, Algorithm(preset="opo"), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_gpg_advantages_agree_but_for_its_factor(seed: int) -> None:
    """verl's α divides by the episodes whose reward is not 0, the paper's by those of groups that are not tied."""
    batch = groups(seed)
    theirs, _ = verls()["compute_gpg_outcome_advantage"](**padded(batch))
    differing = len(batch) - 3
    factor = (len(batch) / differing) / (len(batch) / sum(t.episode_return != 0 for t in batch))
    compare(batch, Algorithm(preset="gpg"), theirs * factor)


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_pass_at_k_is_ours_where_k_is_the_groups_size(seed: int) -> None:
    batch = groups(seed, (4, 4, 4))
    config = {"norm_adv_by_std_in_grpo": False}
    theirs, _ = verls()["compute_grpo_passk_outcome_advantage"](**padded(batch), config=config)
    compare(batch, Algorithm(preset="pkpo", best_of=4), 4 * theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weights", [{}, {"right": 2.0, "form": 0.5}])
def test_verls_gdpo_agrees(seed: int, weights: dict[str, float]) -> None:
    batch = groups(seed)
    given, names = padded(batch), ["form", "right"]
    prompts = torch.zeros(len(batch), 3)
    theirs, _ = verls()["compute_gdpo_outcome_advantage"](
        **given,
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": [weights.get(name, 1.0) for name in names]},
        non_tensor_batch={name: [t.named_returns[name] for t in batch] for name in names},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, given["response_mask"]], 1).long()},
    )
    tokens = int(given["response_mask"].sum())
    unbiased = (tokens / (tokens - 1)) ** 0.5  # verl whitens by the deviation with n − 1
    compare(batch, Algorithm(preset="gdpo", reward_weights=weights), theirs * unbiased, 1e-5)  # its scores are float32


@pytest.mark.parametrize("seed", SEEDS)
def test_verls_remax_agrees(seed: int) -> None:
    batch, rng = groups(seed, (4, 3, 1, 2)), np.random.default_rng(seed)
    greedy = {f"g{g}": float(rng.normal()) for g in range(4)}
    batch = [replace(t, greedy_return=greedy[t.group_id]) for t in batch]
    given = padded(batch)
    baselines = torch.tensor([greedy[t.group_id] for t in batch], dtype=torch.float64)
    theirs, _ = verls()["compute_remax_outcome_advantage"](
        given["token_level_rewards"], baselines, given["response_mask"]
    )
    compare(batch, Algorithm(preset="remax"), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (0.97, 0.9)])
def test_verls_gae_agrees(seed: int, gamma: float, lambda_: float) -> None:
    batch, rng = groups(seed), np.random.default_rng(seed)
    values = [rng.normal(size=t.length).astype(np.float32) * t.loss_mask for t in batch]
    given = padded(batch)
    mask = given["response_mask"]
    known = torch.zeros_like(mask)
    for row, (t, of_t) in enumerate(zip(batch, values, strict=True)):
        own = of_t[t.loss_mask]
        known[row, : len(own)] = torch.from_numpy(own)
    theirs, targets = verls()["compute_gae_advantage_return"](
        given["token_level_rewards"], known, mask, torch.tensor(gamma), torch.tensor(lambda_)
    )
    algorithm = Algorithm(preset="ppo", gae_gamma=gamma, gae_lambda=lambda_)
    ours, ours_targets = gae_advantages(batch, algorithm, values)
    tokens = int(mask.sum())
    unbiased = (tokens / (tokens - 1)) ** 0.5  # as in GDPO
    for row, (t, a, target) in enumerate(zip(batch, ours, ours_targets, strict=True)):
        n = int(t.loss_mask.sum())
        assert a[t.loss_mask].tolist() == pytest.approx((theirs[row, :n] * unbiased).tolist(), rel=1e-5, abs=1e-6)
        assert target[t.loss_mask].tolist() == pytest.approx(targets[row, :n].tolist(), rel=1e-5, abs=1e-6)
