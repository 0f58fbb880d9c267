"""Steps of the trainer on the fake accelerator, in one process: every feature, and tensors planted on the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import AGES, masked_samples, random_samples
from torch import Tensor

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import AgentRLError, MisplacedTensor
from agentrl.trainer import forward_pass, update
from agentrl.trainer.metrics.fact_collector import FactCollector
from agentrl.trainer.models import critic, policy, run_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Microbatch, Sample
from agentrl.trainer.planning.fake.fake_accelerator import FakeAccelerator, fake_world
from agentrl.trainer.scoring import make_samples

PPO = {"preset": "ppo", "kl_coef": 0.1}
FEATURES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one rank": ((1, 1, 1), {}),
    "shards": ((4, 1, 1), {}),
    "replicas": ((4, 2, 1), {"dtype": "bfloat16"}),
    "tensor": ((4, 1, 2), {}),
    "context": ((4, 1, 1, 2), {}),
    "context, tensor, critic": ((8, 1, 2, 2), {"algorithm": PPO, "dtype": "bfloat16"}),
    "tensor, replicas, bfloat16, checkpointing": (
        (8, 2, 2),
        {"dtype": "bfloat16", "activation_checkpointing": True},
    ),
    "one rank, bfloat16": ((1, 1, 1), {"dtype": "bfloat16"}),
    "top layers": ((2, 1, 1), {"train_layers": 1}),
    "adapter": ((2, 1, 1), {"lora": {"rank": 3}}),
    "adapter, tensor": ((2, 1, 2), {"lora": {"rank": 3}}),
    "critic and reference": ((2, 1, 1), {"algorithm": PPO}),
    "critic and reference, one rank": ((1, 1, 1), {"algorithm": PPO}),
    "critic and reference, tensor": ((4, 1, 2), {"algorithm": PPO, "dtype": "bfloat16"}),
    "penalty in the reward": ((2, 1, 1), {"algorithm": {"kl_coef": 0.1, "kl": "reward"}}),
    "gathered": ((2, 1, 1), {"keep_gathered": True}),
    "offload": ((2, 1, 1), {"cpu_offload": True, "dtype": "bfloat16", "activation_checkpointing": True}),
    "minibatches": ((2, 1, 1), {"minibatches": 2}),
    "entropy": ((1, 1, 1), {"algorithm": {"entropy_coef": 0.01}}),
    "second moment": ((2, 1, 1), {"algorithm": {"m2_threshold": 0.1}}),
    "interpolated": ((1, 1, 1), {"algorithm": {"proximal": "interpolate"}}),
    "masked outputs": ((2, 1, 1), {}),
}
"""Feature → ranks, replicas, tensor ranks and context ranks, and the trainer's settings."""


def step(folder: Path, layout: tuple[int, ...], settings: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
    """One step of rank 0; returns what it must have: packed sequences, tensors on the device, metrics."""
    config = TrainerConfig(lr=1e-4, tokens_per_microbatch=60, **settings)
    ranks, replicas, tensor, context = (*layout, 1)[:4]
    with fake_world(ranks, replicas, tensor, context=context) as world, FakeAccelerator():
        models = run_models.make_models(folder, config, world)
        optimizer = make_optimizer(models.policy, config)
        trajectories = [s.tokens for s in samples]
        share = make_samples(trajectories, config.algorithm, models, config.tokens_per_microbatch, world)
        taught = [
            replace(s, advantages=s.tokens.loss_mask.astype("float32")) for s in share.samples
        ]  # all groups teach
        share = replace(share, samples=taught)
        facts = FactCollector(set(), config.algorithm)
        metrics = update.update_policy(
            models.policy, optimizer, share, 1, AGES, config, world, models.critic, token_facts=facts
        )
        run_models.after_step(models, 1, config, metrics)
        held = [p for _, p in models.policy.trainable()]
        where = {local(p).device.type for p in held} | {
            local(t).device.type for state in optimizer.state.values() for t in state.values() if t.dim()
        }
    return {"packed": not models.policy.unpacked, "devices": sorted(where), "tokens": metrics["tokens_trained"]}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def weight_on_cpu() -> Any:
    """A weight of the model does not move."""
    load = run_models.load_sharded

    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        norm = model.blocks.norm
        norm._parameters["weight"] = torch.nn.Parameter(torch.ones(norm.weight.shape))
        return model

    return mock.patch.object(run_models, "load_sharded", loaded)


def field_on_cpu(name: str) -> Any:
    """A tensor of the microbatch does not move."""
    to = Microbatch.to
    return mock.patch.object(
        Microbatch, "to", lambda self, device: replace(to(self, device), **{name: getattr(self, name)})
    )


def made_on_cpu() -> Any:
    """The loss makes a tensor without a device."""
    loss = forward_pass.policy_loss

    def with_weights(tokens: Any, *args: Any) -> Any:
        found, sums = loss(tokens, *args)
        return (found * torch.ones(3)).sum(), sums

    return mock.patch.object(forward_pass, "policy_loss", with_weights)


def head_on_cpu() -> Any:
    """The critic's new head does not move."""
    scalars = critic.Critic.scalars

    def with_head(self: Any, batch: Microbatch, head: Any) -> Tensor:
        head._parameters["weight"] = torch.nn.Parameter(torch.zeros(1, 32))
        return scalars(self, batch, head)

    return mock.patch.object(critic.Critic, "scalars", with_head)


def between_blocks() -> Any:
    """The body adds a tensor of the CPU to hidden states."""
    hidden = policy.Body.hidden
    return mock.patch.object(policy.Body, "hidden", lambda self, batch: hidden(self, batch) + torch.zeros(32))


PLANTED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a weight": (weight_on_cpu, {}, "fused_norms.py"),
    "a field of the microbatch": (lambda: field_on_cpu("temperatures_P"), {}, "head.py"),
    "another field": (lambda: field_on_cpu("advantages_S"), {}, "clipping.py"),
    "a tensor without a device": (made_on_cpu, {}, "forward_pass.py"),
    "a critic's head": (head_on_cpu, {"algorithm": PPO}, "policy.py"),
    "between blocks": (between_blocks, {}, "within Policy"),
}
"""Planted tensor → how it is planted, the settings, and a word that the error must contain."""


def rehearse(folder: Path, answers: Connection) -> None:
    """Send the result of every feature, and the message of every planted tensor."""
    for name, (layout, settings) in FEATURES.items():
        samples = masked_samples() if name == "masked outputs" else random_samples(1, groups=8, size=3)
        try:
            answers.send((name, step(folder, layout, settings, samples)))
        except (AgentRLError, RuntimeError, AssertionError, NotImplementedError, AttributeError, TypeError, ValueError):
            answers.send((name, {"failed": traceback.format_exc()[-3000:]}))
    for name, (plant, settings, _) in PLANTED.items():
        with ExitStack() as stack:
            stack.enter_context(plant())
            try:
                step(folder, (1, 1, 1), settings, random_samples(1, groups=2, size=3))
                answers.send((name, "nothing was found"))
            except MisplacedTensor as error:
                answers.send((name, str(error)))
    answers.close()
