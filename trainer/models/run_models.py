"""The models of a run: the policy, and the reference policy and critic where the algorithm needs them.

They are made while the policy is still the base model. Every checkpoint has those parts of the models that change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.episodes.teachers import POLICY, is_server, teachers_of
from agentrl.configs.trainer_config import LoraConfig, TrainerConfig, UpdateConfig
from agentrl.errors import StoreError, UserError
from agentrl.models import resolve_model
from agentrl.models.same_tokens import check_same_tokens
from agentrl.trainer.algorithms.kl import adapted
from agentrl.trainer.averages.noise_scale import NoiseScale
from agentrl.trainer.averages.weight_average import WeightAverage
from agentrl.trainer.checkpoints import checkpoint_reader, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, Parts
from agentrl.trainer.distributed import World
from agentrl.trainer.models.critic import Critic, Learner
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.reference import Reference
from agentrl.trainer.models.sharding import AnyBody, load_sharded
from agentrl.trainer.optimizer import make_optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """The models of a run."""

    policy: Policy
    reference: Reference | None = None
    critic: Learner | None = None
    teachers: Mapping[str, Policy] = field(default_factory=dict)  # those that the trainer has, by name
    kl_coef: torch.Tensor | None = None
    """0-dim float64, where a controller changes it (`kl_target`)."""
    average: WeightAverage | None = None
    noise: NoiseScale | None = None

    def algorithm(self, configured: Algorithm) -> Algorithm:
        """The configured algorithm with the present weight of the divergence."""
        if self.kl_coef is None:
            return configured
        return configured.model_copy(update={"kl_coef": float(self.kl_coef)})


def load(
    wrap: Callable[[Any], AnyBody], base_model: Path, config: UpdateConfig, world: World, **routing: bool
) -> AnyBody:
    """A model with the base model's weights, sharded as configured; `routing` as `load_sharded` takes it."""
    return load_sharded(
        wrap,
        base_model,
        world.mesh,
        train_layers=config.train_layers,
        dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
        activation_checkpointing=config.activation_checkpointing,
        activation_offload=config.activation_offload,
        cpu_offload=config.cpu_offload,
        keep_gathered=config.keep_gathered,
        adapter=config.lora,
        attention=config.attention,
        **routing,
    )


def make_models(base_model: Path, config: TrainerConfig, world: World) -> Models:
    """Load the policy and the models that its algorithm needs."""
    replays, balances = config.routing_replay == "engine", config.router_aux_loss_coef > 0
    policy = load(Policy, base_model, config, world, replay_routing=replays, balance_routers=balances)
    reference = critic = None
    if config.algorithm.needs_reference:
        reference = Reference(policy)
        if config.reference:
            reference.overlay(config.reference, world)
    if config.algorithm.needs_critic:
        model = load(Critic, base_model, config, world)
        if config.critic_from is not None:
            folder = resolve_model(str(config.critic_from))
            check_same_tokens(base_model, folder, "trainer.critic_from")
            model.begin_as(folder)
        critic = Learner(model, make_optimizer(model, config, config.critic_lr))
    if config.algorithm.compares_vocabularies and policy.context is not None:
        raise UserError("algorithm.distill: full is not possible with resources.trainer.context above 1: use sampled")
    teachers = {
        name: policy if name == POLICY else _load_teacher(name, base_model, policy, config, world)
        for name in teachers_of(config.teacher)
        if not is_server(name)
    }
    begins = config.algorithm.kl_coef if config.algorithm.kl_target else None
    kl_coef = None if begins is None else torch.tensor(begins, dtype=torch.float64)
    return Models(
        policy=policy,
        reference=reference,
        critic=critic,
        teachers=teachers,
        kl_coef=kl_coef,
        average=None if config.average is None else WeightAverage(policy, config.average.decay),
        noise=None if config.noise_scale is None else NoiseScale(config.noise_scale.decay),
    )


def _load_teacher(name: str, base_model: Path, policy: Policy, config: TrainerConfig, world: World) -> Policy:
    """A teacher, which never learns. Collective. Raises ModelFolderError, and UserError where it cannot be used."""
    folder = resolve_model(name)
    check_same_tokens(base_model, folder)
    plain = config.model_copy(update={"train_layers": None, "lora": LoraConfig(), "activation_checkpointing": False})
    teacher = load(Policy, folder, plain.model_copy(update={"activation_offload": False}), world)
    if bool(teacher.unpacked) != bool(policy.unpacked):
        why = teacher.unpacked or policy.unpacked
        raise UserError(f"trainer.teacher: {folder} and the policy read batches in different ways: {why}")
    return teacher


def after_step(models: Models, step: int, config: TrainerConfig, metrics: Mapping[str, float]) -> None:
    """After a step that has changed the policy: refresh the reference policy when it is due, average the weights, and
    control `kl_coef` by the step's metrics, which lack `kl_reference` if the caller has computed the loss.
    """
    algorithm = config.algorithm
    if models.average is not None:
        models.average.add(models.policy)
    if models.reference and algorithm.kl_refresh_steps and step % algorithm.kl_refresh_steps == 0:
        models.reference.refresh()
    measured = metrics.get("kl_reference") if metrics["tokens_trained"] else None
    if models.kl_coef is not None and algorithm.kl_target and measured is not None:
        models.kl_coef.fill_(adapted(float(models.kl_coef), measured, algorithm.kl_target, algorithm.kl_gain))


def parts(models: Models, optimizer: torch.optim.Optimizer, config: TrainerConfig) -> Parts:
    """The parts of a checkpoint: the policy, its optimizer, and everything else that changes."""
    found = dict(checkpoint_writer.state_of("policy", models.policy, optimizer))
    if models.reference and config.algorithm.kl_refresh_steps:
        found["reference"] = models.reference.tensors
    if models.kl_coef is not None:
        found["kl_controller"] = {"kl_coef": models.kl_coef}
    for one in (models.average, models.noise):
        found |= {} if one is None else one.parts()
    if models.critic:
        found |= checkpoint_writer.state_of("critic", models.critic.critic, models.critic.optimizer)
    return found


def restore(
    found: Checkpoint, models: Models, optimizer: torch.optim.Optimizer, config: TrainerConfig, world: World
) -> None:
    """Restore `parts` and random states. Collective. Raises StoreError when a needed part was not saved."""
    for name in parts(models, optimizer, config):
        if not name.endswith("_optimizer") and not checkpoint_reader.shapes(found.folder, name):
            raise StoreError(f"checkpoint {found.folder} has no {name}: trainer.algorithm changed")
    checkpoint_reader.load(found, models.policy, optimizer, world)
    if models.reference and config.algorithm.kl_refresh_steps:
        checkpoint_reader.fill(found.folder, "reference", models.reference.tensors, world)
    if models.kl_coef is not None:
        checkpoint_reader.fill(found.folder, "kl_controller", {"kl_coef": models.kl_coef}, world)
    for one in (models.average, models.noise):
        for name, tensors in ({} if one is None else one.parts()).items():
            checkpoint_reader.fill(found.folder, name, tensors, world)
    if models.critic:
        checkpoint_reader.restore(found, "critic", models.critic.critic, models.critic.optimizer, world)
