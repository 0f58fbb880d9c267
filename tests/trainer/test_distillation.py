"""A step that learns from a teacher: its advantages, its gradient, and a student that comes nearer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import load_plain, padded_logprobs
from support import AGES, VOCABULARY, random_samples, random_trajectory, save_tiny_model
from torch import Tensor

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models import run_models
from agentrl.trainer.models.run_models import Models, make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another model than the student, wider, in a folder without a tokenizer."""
    monkeypatch.setattr(run_models, "resolve_model", Path)
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    return save_tiny_model(tmp_path / "teacher", seed=5, hidden_size=48)


def trajectories() -> list[TrajectoryTokens]:
    return [s.tokens for s in random_samples()]


def configured(teacher: Path, **algorithm: Any) -> TrainerConfig:
    return TrainerConfig(algorithm={"distill_coef": 0.5} | algorithm, teacher=str(teacher), lr=1e-3)


def step(models: Models, config: TrainerConfig, world: World, optimizer: Any = None) -> dict[str, float]:
    share = make_samples(trajectories(), config.algorithm, models, config.token_budget, world)
    optimizer = optimizer or torch.optim.SGD([p for _, p in models.policy.trainable()], lr=0.0)
    return update_policy(models.policy, optimizer, share, 1, AGES, config, world, teachers=models.teachers)


def of_loss_tokens(found: Tensor, batch: list[TrajectoryTokens]) -> list[Tensor]:
    return [row[: len(t.loss_mask) - 1][torch.from_numpy(t.loss_mask[1:])] for row, t in zip(found, batch, strict=True)]


@pytest.mark.parametrize("reward_weight", [1.0, 0.0, 0.3])
def test_a_sampled_token_costs_its_own_divergence(
    tiny_model: Path, teacher: Path, world: World, reward_weight: float
) -> None:
    batch, config = trajectories(), configured(teacher, reward_weight=reward_weight)
    models = make_models(tiny_model, config, world)
    share = make_samples(batch, config.algorithm, models, config.token_budget, world)
    plain = TrainerConfig()
    of_rewards = make_samples(batch, plain.algorithm, make_models(tiny_model, plain, world), 4096, world)
    with torch.no_grad():
        own, other = (of_loss_tokens(padded_logprobs(load_plain(f), batch)[0], batch) for f in (tiny_model, teacher))
    expected = {
        t.trajectory_id: reward_weight * r.advantages[t.loss_mask] - 0.5 * (a - b).numpy()
        for t, r, a, b in zip(batch, of_rewards.samples, own, other, strict=True)
    }
    for sample in share.samples:
        got = sample.advantages[sample.tokens.loss_mask]
        np.testing.assert_allclose(got, expected[sample.tokens.trajectory_id], rtol=1e-4, atol=1e-5)
        assert not sample.advantages[~sample.tokens.loss_mask].any()
    metrics = step(models, config, world)
    assert metrics["kl_teacher"] == pytest.approx(float(torch.cat(own).mean() - torch.cat(other).mean()), rel=1e-4)


@pytest.mark.parametrize("preset", ["gdpo", "gigpo", "reinforce++"])
def test_a_teacher_is_added_to_the_advantages_of_rewards(
    tiny_model: Path, teacher: Path, world: World, preset: str
) -> None:
    rng = np.random.default_rng(0)
    rewards = {t.episode_id: {"right": float(rng.integers(2)), "form": float(rng.normal())} for t in trajectories()}
    batch = [
        replace(t, named_returns=rewards[t.episode_id], episode_return=sum(rewards[t.episode_id].values()))
        for t in trajectories()
    ]
    config, plain = configured(teacher, preset=preset), TrainerConfig(algorithm=preset)
    taught = make_samples(batch, config.algorithm, make_models(tiny_model, config, world), 4096, world)
    alone = make_samples(batch, plain.algorithm, make_models(tiny_model, plain, world), 4096, world)
    assert any(sample.advantages.any() for sample in alone.samples)
    for one, other in zip(taught.samples, alone.samples, strict=True):
        assert one.teacher is not None
        assert one.proximal is not None
        cost = 0.5 * (one.proximal - one.teacher)
        mask = one.tokens.loss_mask
        np.testing.assert_allclose(one.advantages[mask], (other.advantages - cost)[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["sampled", "full"])
def test_the_teachers_passes_are_counted(tiny_model: Path, teacher: Path, world: World, form: str) -> None:
    config = configured(teacher, distill=form)
    models = make_models(tiny_model, config, world)
    alone = TrainerConfig(
        algorithm={"kl_coef": 0.1}
    )  # as many passes over the same tokens as `full`, without a teacher
    without = step(make_models(tiny_model, alone, world), alone, world)
    found = step(models, config, world)
    (own,) = models.teachers.values()
    assert not any(own.counted.taken().values())  # all were taken
    assert found["flops"] > without["flops"]


@pytest.mark.parametrize("top_k", [None, 7])
def test_the_gradient_of_full_distillation_is_that_of_separate_sequences(
    tiny_model: Path, teacher: Path, world: World, top_k: int | None
) -> None:
    batch = trajectories()
    config = configured(teacher, distill="full", reward_weight=0.0, aggregation="token_mean", distill_top_k=top_k)
    models = make_models(tiny_model, config, world)
    found: dict[str, Tensor] = {}
    for name, p in models.policy.trainable():
        p.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    config = config.model_copy(update={"grad_clip": 1e9})
    metrics = step(models, config, world)

    lm, other = load_plain(tiny_model), load_plain(teacher)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for t in batch:
        where = torch.from_numpy(np.flatnonzero(t.loss_mask)) - 1
        ids, heat = (
            torch.from_numpy(t.input_ids).long()[None],
            torch.from_numpy(t.temperatures).double()[where + 1, None],
        )
        own = lm(input_ids=ids).logits[0, where] / heat
        with torch.no_grad():
            theirs = other(input_ids=ids).logits[0, where] / heat
        if top_k is not None:
            kept = theirs.topk(top_k).indices
            own, theirs = own.gather(1, kept), theirs.gather(1, kept)
        log_p, log_q = torch.log_softmax(own, -1), torch.log_softmax(theirs, -1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
        tokens += len(where)
    (0.5 * total / tokens).backward()
    assert metrics["kl_teacher"] == pytest.approx(total.item() / tokens, rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * total.item() / tokens, rel=1e-5)
    for name, p in lm.named_parameters():
        torch.testing.assert_close(found[name].double(), p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "form",
    [{}, {"distill": "full"}, {"distill": "full", "distill_divergence": "forward"}],
    ids=str,
)
def test_a_student_comes_nearer_to_its_teacher(
    tiny_model: Path, teacher: Path, world: World, form: dict[str, Any]
) -> None:
    """From tokens that it samples itself, without any reward."""
    config = configured(teacher, reward_weight=0.0, aggregation="token_mean", **form)
    config = config.model_copy(update={"lr": 3e-3})
    models = make_models(tiny_model, config, world)
    optimizer, generator = make_optimizer(models.policy, config), torch.Generator().manual_seed(0)
    student, other = load_plain(tiny_model), load_plain(teacher)
    prompts = torch.randint(3, VOCABULARY, (4, 5), generator=generator)
    distances = []
    for _ in range(13):
        student.load_state_dict({n: full(p).double() for n, p in models.policy.lm.named_parameters()}, strict=False)
        with torch.no_grad():
            log_p, log_q = (torch.log_softmax(m(input_ids=prompts).logits[:, -1], -1) for m in (student, other))
        distances.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))  # over the vocabulary, exactly
        share = make_samples(answers(prompts, log_p, generator), config.algorithm, models, config.token_budget, world)
        update_policy(models.policy, optimizer, share, 1, AGES, config, world, teachers=models.teachers)
    assert distances[-1] < 0.6 * distances[0]


def answers(prompts: Tensor, logprobs: Tensor, generator: torch.Generator) -> list[TrajectoryTokens]:
    """Sixteen sampled tokens to each prompt."""
    found = []
    for g, prompt in enumerate(prompts.tolist()):
        for k, token in enumerate(torch.multinomial(logprobs[g].exp(), 16, True, generator=generator).tolist()):
            t = random_trajectory(
                np.random.default_rng(0), prompt, group=f"g{g}", name=f"t{k}", turns=1, outputs=[[token]], version=1
            )
            recorded = np.where(t.loss_mask, logprobs[g, token].item(), 0).astype(np.float32)
            found.append(replace(t, logprobs=recorded))
    return found


def test_other_models_and_minibatches_do_not_change_what_a_teacher_costs(
    tiny_model: Path, teacher: Path, world: World
) -> None:
    config = configured(teacher, preset="ppo", kl_coef=0.1)
    config = config.model_copy(update={"minibatches": 2})
    models = make_models(tiny_model, config, world)
    assert models.critic is not None
    share = make_samples(trajectories(), config.algorithm, models, config.token_budget, world, minibatches=2)
    alone = TrainerConfig(algorithm={"preset": "ppo", "kl_coef": 0.1})
    plain = make_samples(trajectories(), alone.algorithm, make_models(tiny_model, alone, world), 4096, world)
    for one, other in zip(share.samples, plain.samples, strict=True):
        assert one.teacher is not None
        assert one.proximal is not None
        cost = 0.5 * (one.proximal - one.teacher)
        np.testing.assert_allclose(one.advantages, other.advantages - cost, rtol=1e-4, atol=1e-5)
    optimizer = make_optimizer(models.policy, config)
    metrics = update_policy(models.policy, optimizer, share, 1, AGES, config, world, models.critic)
    assert metrics["kl_teacher"] != 0
