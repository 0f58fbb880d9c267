"""The gradient noise scale against its definition, against gradients of the same samples, and over a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_setup import Setup, die_before
from pydantic import ValidationError
from support import AGES, random_samples

from agentrl.configs.trainer_config import NoiseScaleConfig, TrainerConfig
from agentrl.store import Connection
from agentrl.store.training import steps
from agentrl.trainer import update as policy_update
from agentrl.trainer.averages.noise_scale import Estimate, Estimates, NoiseScale, estimate, rate_factor
from agentrl.trainer.batches.share import minibatch_packs, share_of
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample

POSITIVE = st.floats(0.01, 100)


@given(POSITIVE, POSITIVE, st.integers(1, 50), st.integers(1, 50))
def test_an_estimate_is_exact_for_expected_norms(signal: float, noise: float, small: int, more: int) -> None:
    big = small + more
    norms = [(signal + noise / size) ** 0.5 for size in (small, big)]  # E|G_B|² = |G|² + tr(Σ)/B
    found = estimate(norms[0], small, norms[1], big)
    assert found.signal == pytest.approx(signal, rel=1e-6, abs=1e-6 * noise)
    assert found.noise == pytest.approx(noise, rel=1e-6, abs=1e-6 * signal * big)
    assert found.batch == big


def test_estimates_of_random_gradients_have_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, sizes = torch.full((20,), 0.3, dtype=torch.float64), (3, 12)
    found = []
    for _ in range(4000):
        samples = mean + torch.randn(sizes[1], 20, generator=generator, dtype=torch.float64)
        small, big = (float(samples[:size].mean(0).norm()) for size in sizes)
        found.append(estimate(small, sizes[0], big, sizes[1]))
    assert sum(one.signal for one in found) / 4000 == pytest.approx(20 * 0.3**2, rel=0.03)
    assert sum(one.noise for one in found) / 4000 == pytest.approx(20.0, rel=0.03)


@given(st.floats(0, 1e6), POSITIVE, POSITIVE, st.floats(0.1, 1))
def test_the_rate_grows_with_the_batch_at_most_in_proportion(
    noise: float, batch: float, reference: float, power: float
) -> None:
    factor = rate_factor(noise, batch, reference, power)
    ends = sorted([1.0, (batch / reference) ** power])
    assert ends[0] - 1e-9 <= factor <= ends[1] * (1 + 1e-9)
    assert rate_factor(0.0, batch, reference, power) == 1.0
    assert rate_factor(1e12, batch, reference, 1.0) == pytest.approx(batch / reference, rel=1e-6)


@given(st.lists(st.tuples(st.floats(-5, 50), st.floats(-5, 50), POSITIVE), min_size=1, max_size=20), st.floats(0, 0.99))
def test_the_scale_is_the_ratio_of_averages(rows: list[tuple[float, float, float]], decay: float) -> None:
    scale = NoiseScale(decay)
    assert (scale.value, scale.factor(8.0, 1.0)) == (None, 1.0)
    for row in rows:
        scale.add(Estimates([Estimate(*row)]))
        scale.add(Estimates())  # a step without estimates changes nothing
    shares = [decay**age for age in reversed(range(len(rows)))]
    signal, noise, batch = (
        sum(w * row[i] for w, row in zip(shares, rows, strict=True)) / sum(shares) for i in range(3)
    )
    assert scale.batch == pytest.approx(batch, rel=1e-6)
    if signal > 1e-6:
        assert scale.value == pytest.approx(max(0.0, noise) / signal, rel=1e-4, abs=1e-6)
        expected = rate_factor(max(0.0, noise) / signal, batch, 8.0, 0.5)
        assert scale.factor(8.0, 0.5) == pytest.approx(expected, rel=1e-4)
    elif signal < -1e-6:
        assert (scale.value, scale.factor(8.0, 0.5)) == (None, 1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_minibatch_is_measured_by_its_own_gradients(tiny_model: Path, world: World, aggregation: str) -> None:
    base = TrainerConfig(lr=1e-9, grad_clip=1e9, tokens_per_microbatch=64)
    config = base.model_copy(update={"algorithm": base.algorithm.model_copy(update={"aggregation": aggregation})})
    samples = random_samples()

    def norm_of(chosen: list[Sample]) -> float:
        policy: Policy = load_sharded(Policy, tiny_model, world.mesh)
        found = policy_update.update_policy(policy, make_optimizer(policy, config), chosen, 1, AGES, config, world)
        return found["grad_norm"]

    share = share_of(samples, config.algorithm, 1, 64, world)
    (packs,), _ = minibatch_packs(share, config.algorithm, 1, 64, world)
    assert len(packs) > 1
    first = policy_update._shuffled(packs, "1/0")[0].samples
    policy: Policy = load_sharded(Policy, tiny_model, world.mesh)
    noise = Estimates()
    optimizer = make_optimizer(policy, config)
    policy_update.update_policy(policy, optimizer, samples, 1, AGES, config, world, noise=noise)
    (found,) = noise.found
    tokens = [sum(int(s.tokens.loss_mask.sum()) for s in of) for of in (first, samples)]
    part = tokens[0] / tokens[1] if aggregation == "token_mean" else len(first) / len(samples)
    expected = estimate(norm_of(first), len(samples) * part, norm_of(samples), len(samples))
    assert found.batch == len(samples)
    assert found.signal == pytest.approx(expected.signal, rel=1e-3)
    assert found.noise == pytest.approx(expected.noise, rel=1e-3)


def test_one_microbatch_has_no_estimate(tiny_model: Path, world: World) -> None:
    config, noise = TrainerConfig(lr=1e-9), Estimates()
    policy: Policy = load_sharded(Policy, tiny_model, world.mesh)
    optimizer = make_optimizer(policy, config)
    policy_update.update_policy(policy, optimizer, random_samples(), 1, AGES, config, world, noise=noise)
    assert noise.found == []


def test_a_resumed_run_goes_on_with_the_scale_and_its_rate(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"noise_scale": NoiseScaleConfig(reference_batch=60), "tokens_per_microbatch": 24}
    whole = Setup(tmp_path_factory.mktemp("whole"), setup.model, setup.world)
    with whole.proxy:
        assert whole.train(**settings)
    rates, last = whole.step_metrics("lr"), dict(whole.database.query(newest, whole.run_id))
    whole.database.close()
    die_before(monkeypatch, setup, 3, **settings)
    assert setup.train(**settings)
    assert setup.step_metrics("lr") == rates
    assert dict(setup.database.query(newest, setup.run_id)).get("noise_scale") == last.get("noise_scale")
    assert rates[0] == 1e-3  # nothing is known yet
    assert all(1e-4 <= rate <= 1e-3 for rate in rates)  # 6 trajectories in place of 60: at least a tenth
    assert "noise_scale" in last
    assert rates[2] < 1e-3


def newest(conn: Connection, run_id: str) -> dict[str, float]:
    return dict(steps.of_run(conn, run_id)[-1].metrics)


def test_gathered_weights_leave_no_gradient_in_between() -> None:
    with pytest.raises(ValidationError, match="noise_scale needs the gradient of the first microbatch"):
        TrainerConfig(noise_scale=NoiseScaleConfig(), keep_gathered=True)
