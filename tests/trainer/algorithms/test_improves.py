"""Every preset raises the expected reward, from one fixed rollout of the model itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from support import AGES, VOCABULARY, random_trajectory
from transformers import AutoModelForCausalLM

from agentrl.configs.presets import PRESETS
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy

GROUPS, SIZE, STEPS = 4, 12, 12
REWARDED = torch.arange(VOCABULARY) % 3 == 0


def expected_reward(model: torch.nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """(groups,) the probability of a rewarded next token, exactly."""
    with torch.no_grad():
        return torch.softmax(model(input_ids=prompts).logits[:, -1], -1)[:, REWARDED].sum(-1)


def rollout(model: torch.nn.Module, prompts: torch.Tensor) -> list[TrajectoryTokens]:
    """One sampled token each: reward 1 if it is one of a third of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=prompts).logits[:, -1], -1)
    found = []
    for g, prompt in enumerate(prompts.tolist()):
        for k, token in enumerate(torch.multinomial(logprobs[g].exp(), SIZE, True, generator=generator).tolist()):
            t = random_trajectory(
                np.random.default_rng(0), prompt, group=f"g{g}", name=f"t{k}", turns=1, outputs=[[token]], version=1
            )
            value = float(REWARDED[token])
            recorded = np.where(t.loss_mask, logprobs[g, token].item(), 0).astype(np.float32)
            found.append(
                dataclasses.replace(
                    t,
                    logprobs=recorded,
                    turn_returns=np.array([value], np.float64),
                    episode_return=value,
                    named_returns={"right": value},
                    greedy_return=float(REWARDED[logprobs[g].argmax()]),
                )
            )
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_the_expected_reward_rises(tiny_model: Path, world: World, preset: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = torch.randint(3, VOCABULARY, (GROUPS, 5), generator=torch.Generator().manual_seed(1))
    before = expected_reward(plain, prompts)
    trajectories = rollout(plain, prompts)
    config = TrainerConfig(algorithm=preset, lr=1e-3, critic_lr=1e-3)
    models = make_models(tiny_model, config, world)
    optimizer = make_optimizer(models.policy, config)
    for _ in range(STEPS):
        samples = make_samples(trajectories, config.algorithm, models, config.token_budget, world)
        update_policy(models.policy, optimizer, samples, 1, AGES, config, world, models.critic)
    trained = {name: full(p) for name, p in models.policy.lm.named_parameters()}
    plain.load_state_dict(trained, strict=False)
    gain = (expected_reward(plain, prompts) - before).mean()
    assert gain > 0.1
