"""Each method improves what it is for in at most 40 steps, from one fixed rollout of the model itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support import VOCABULARY, random_trajectory
from transformers import AutoModelForCausalLM
from tuning_setup import config_of

from agentrl.configs.tuning_config import PairDataConfig, SftDataConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.distributed import World
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning import recorded
from agentrl.trainer.tuning.items import Data, Item
from agentrl.trainer.tuning.tuning_loop import tune

GROUPS, SIZE, STEPS = 4, 16, 20
RANKS = (0, 8)
"""Whole matrices, and adapters."""
REWARDED = torch.arange(VOCABULARY) % 3 == 0
PROMPTS = torch.randint(3, VOCABULARY, (GROUPS, 5), generator=torch.Generator().manual_seed(1))


def rollout(folder: Path) -> list[TrajectoryTokens]:
    """One sampled token each, rewarded with 1 if it is one of a third of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    sampled = torch.multinomial(next_tokens(folder), SIZE, True, generator=generator)
    found = []
    for g, prompt in enumerate(PROMPTS.tolist()):
        for k, token in enumerate(sampled[g].tolist()):
            made = random_trajectory(
                np.random.default_rng(0), prompt, group=f"g{g}", name=f"t{k}", turns=1, outputs=[[token]]
            )
            found.append(dataclasses.replace(made, episode_return=float(REWARDED[token])))
    return found


def next_tokens(folder: Path) -> torch.Tensor:
    """(groups, vocabulary) probabilities of the token after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.softmax(model(input_ids=PROMPTS).logits[:, -1], -1)


def expected_reward(folder: Path) -> float:
    return float(next_tokens(folder)[:, REWARDED].sum(-1).mean())


def run(kind: str, items: list[Item], folder: Path, out: Path, world: World, rank: int) -> list[dict[str, float]]:
    """Train on all items at each step, whole or an adapter of some rank; the metrics of the steps."""
    lr = 1e-2 if rank else 1e-3
    config = config_of(kind, out, batch_size=len(items), lr=lr, lora={"rank": rank}).model_copy(update={"steps": STEPS})
    assert tune(config, folder, Data(items, []), world, Stop())
    return [json.loads(line) for line in (out / "test" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rank", RANKS)
def test_imitating_rewarded_episodes_raises_the_reward(
    rank: int, tiny_model: Path, world: World, tmp_path: Path
) -> None:
    items = recorded.conversations(rollout(tiny_model), SftDataConfig(run="r", min_reward=1.0))
    metrics = run("sft", items, tiny_model, tmp_path, world, rank)
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert expected_reward(tmp_path / "test" / "model") > expected_reward(tiny_model) + 0.2


@pytest.mark.parametrize(("kind", "rank"), [("dpo", 0), ("ipo", 0), ("dpo", 8)])
def test_preferring_rewarded_episodes_raises_the_reward(
    kind: str, rank: int, tiny_model: Path, world: World, tmp_path: Path
) -> None:
    items = recorded.pairs(rollout(tiny_model), PairDataConfig(run="r", pairs_per_group=4))
    metrics = run(kind, items, tiny_model, tmp_path, world, rank)
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert metrics[-1]["accuracy"] == 1
    assert expected_reward(tmp_path / "test" / "model") > expected_reward(tiny_model) + 0.1


@pytest.mark.parametrize("rank", RANKS)
def test_the_reward_model_learns_the_rewarded_answer(rank: int, tiny_model: Path, world: World, tmp_path: Path) -> None:
    items = recorded.pairs(rollout(tiny_model), PairDataConfig(run="r", pairs_per_group=4))
    metrics = run("reward-model", items, tiny_model, tmp_path, world, rank)
    assert metrics[0]["loss"] > 0.6
    assert metrics[-1]["loss"] < 0.3
    assert metrics[-1]["accuracy"] == 1
