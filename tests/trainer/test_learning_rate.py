"""The learning rate over a run's steps."""

from __future__ import annotations

from typing import Literal

import pytest

from agentrl.configs.trainer_config import TrainerConfig, UpdateConfig
from agentrl.trainer.learning_rate import critic_rate, policy_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_rises_and_falls(
    schedule: Literal["constant", "linear", "cosine"], expected: list[float]
) -> None:
    config = UpdateConfig(lr=1.0, lr_schedule=schedule, warmup_steps=1)
    rates = [policy_rate(n, 5, config) for n in range(1, 6)]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_a_critic_follows_the_policys_schedule_unless_it_has_its_own() -> None:
    shared = TrainerConfig(lr=1.0, critic_lr=2.0, lr_schedule="linear", warmup_steps=1)
    assert [critic_rate(n, 5, shared) for n in range(1, 6)] == [2 * policy_rate(n, 5, shared) for n in range(1, 6)]
    own = TrainerConfig(lr=1.0, critic_lr=2.0, lr_schedule="linear", critic_lr_schedule="constant", warmup_steps=1)
    assert [critic_rate(n, 5, own) for n in range(1, 6)] == [1, 2, 2, 2, 2]
