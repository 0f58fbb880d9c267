"""Steps of the trainer, however they are carried out: what they compute, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from support import AGES
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from agentrl.configs.presets import PRESETS
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.batching import build_tree, line_up
from agentrl.domain.schemas import TrainedBatch, TrajectoryTokens
from agentrl.trainer import packing
from agentrl.trainer.checkpoints import checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, StepRecord
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models import mechanisms, run_models
from agentrl.trainer.models.policy import Body
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.optimizer import moments as moments_of
from agentrl.trainer.packing import Sample
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy

ALLOWED = 1e-5
"""How far two ways of computing loss and gradients may be apart, relative, in float32."""
WHOLE = 1_000_000
"""A token budget that cuts nothing."""
NO_CLIP = 1e9
"""A `grad_clip` that leaves every gradient as it is."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "behavior": {"preset": "dapo", "proximal": "behavior", "correction": "none", "entropy_coef": 0.01},
}
"""What plain.py computes: weights for what older versions sampled; or ratios beyond the clip, and an entropy bonus."""
CASES: dict[str, dict[str, Any]] = {
    **{preset: {"algorithm": preset, "minibatches": 2} for preset in PRESETS},
    "rloo": {"algorithm": "rloo"},  # a moved policy's ratio of a sequence has the rounding errors of all its tokens
    "proximal-interpolated": {"algorithm": {"proximal": "interpolate"}, "minibatches": 2},
    "kl-and-entropy-in-loss": {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "kl-in-reward": {"algorithm": {"preset": "rloo", "kl_coef": 0.1}},
    "kl-controlled": {"algorithm": {"kl_coef": 0.1, "kl_target": 1e-3, "kl_gain": 1.0}},
    "masked-out-of-the-mean": {
        "algorithm": {"correction": "reject", "correction_cap": 1.5, "masked_in_mean": "none"},
        "minibatches": 2,
    },
    "weights-normalised": {"algorithm": {"correction_normalize": True}},
    "taught": {"algorithm": {"distill_coef": 0.5, "distill": "full"}, "teacher": "other", "minibatches": 2},
    "taught-by-tokens": {"algorithm": {"preset": "ppo", "distill_coef": 0.5}, "teacher": "other"},
    "turns-with-values": {
        "algorithm": {"preset": "ppo", "advantage_level": "turn", "bootstrap_truncated": True},
        "minibatches": 2,
    },
    "top-layer": {"train_layers": 1},
    "adapter": {"lora": {"rank": 3, "alpha": 6}},
    "critic-reference-adapter": {
        "algorithm": {"preset": "ppo", "kl_coef": 0.1, "kl_refresh_steps": 1},
        "lora": {"rank": 3, "alpha": 6},
    },
}
"""What is computed differently, as settings of the trainer."""
FACTS = TrainedBatch(step_id="s", digest="d", estimator="", wasted_tokens=0, trained=[])


class Computed(NamedTuple):
    """What came of a step. The critic's tensors are there, too, under `critic.`."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]  # as AdamW got them: `NAME/0` is of the first minibatch
    moments: dict[str, Tensor]  # `NAME/exp_avg` and so on
    weights: dict[str, Tensor]

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


class Run:
    """The models of a run in this world. What it does is collective.

    Without `sharing` no prefix is computed once; `unpacked`, transformers computes every sequence by itself.
    """

    def __init__(
        self,
        model: Path,
        world: World,
        reference: Path | None = None,
        *,
        sharing: bool = True,
        unpacked: bool = False,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        config = TrainerConfig(**{"tokens_per_microbatch": WHOLE, "lr": 1e-4, "critic_lr": 1e-3} | settings)
        if config.algorithm.needs_reference:
            config = config.model_copy(update={"reference": reference})
        if config.teacher is not None:
            config = config.model_copy(update={"teacher": str(reference)})
        self.config, self.world = config, world
        self.build_tree = build_tree if sharing else line_up
        with (
            patch.object(mechanisms, "unpackable", lambda _: "a test asked for it") if unpacked else nullcontext(),
            patch.object(run_models, "resolve_model", Path),  # the folders have no tokenizers
            patch.object(run_models, "check_same_tokens", lambda *_: None),
        ):
            self.models = run_models.make_models(model, self.config, world)
        self.optimizer = make_optimizer(self.models.policy, self.config)

    def step(self, trajectories: Sequence[TrajectoryTokens]) -> Computed:
        """Score a batch and learn from it."""
        c = self.config = self.config.model_copy(update={"algorithm": self.models.algorithm(self.config.algorithm)})
        with patch.object(packing, "build_tree", self.build_tree):
            samples = make_samples(trajectories, c.algorithm, self.models, c.token_budget, self.world)
        found = self.update(samples)
        run_models.after_step(self.models, 1, c, found.metrics)
        return found

    def update(self, samples: Sequence[Sample]) -> Computed:
        """Learn from a batch."""
        gradients: dict[str, Tensor] = {}
        hooks = [keep_gradients(*learner, gradients) for learner in self._learners()]
        with patch.object(packing, "build_tree", self.build_tree):
            metrics = update_policy(
                self.models.policy,
                self.optimizer,
                samples,
                1,
                AGES,
                self.config,
                self.world,
                self.models.critic,
                teachers=self.models.teachers,
            )
        for hook in hooks:
            hook.remove()
        moments: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        for prefix, model, optimizer in self._learners():
            moments |= {prefix + name: full(t).clone() for name, t in moments_of(model, optimizer).items()}
            weights |= {prefix + name: full(p).clone() for name, p in model.trainable()}
        return Computed(metrics, gradients, moments, weights)

    def save(self, folder: Path) -> Checkpoint:
        """All that moves."""
        record = StepRecord(step=1, version=1, batch=FACTS, metrics={})
        parts = run_models.parts(self.models, self.optimizer, self.config)
        return checkpoint_writer.begin(folder, record, parts, self.world, copied=False).finish()

    def restore(self, saved: Checkpoint) -> None:
        """Be the run that was saved."""
        run_models.restore(saved, self.models, self.optimizer, self.config, self.world)

    def _learners(self) -> list[tuple[str, Body, torch.optim.Optimizer]]:
        policy, critic = ("", self.models.policy, self.optimizer), self.models.critic
        return [policy, ("critic.", critic.critic, critic.optimizer)] if critic else [policy]


def keep_gradients(
    prefix: str, model: Body, optimizer: torch.optim.Optimizer, into: dict[str, Tensor]
) -> RemovableHandle:
    """Put those of the optimizer's k-th step from now on into `into`, as `prefixNAME/k`."""
    minibatches = count()

    def keep(*_: Any) -> None:
        k = next(minibatches)
        into.update(
            {f"{prefix}{name}/{k}": full(p.grad).clone() for name, p in model.trainable() if p.grad is not None}
        )

    return optimizer.register_step_pre_hook(keep)


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ of all tensors together."""
    assert found.keys() == expected.keys()
    a, b = (
        torch.cat([tensors[name].detach().double().flatten() for name in expected]) for tensors in (found, expected)
    )
    return 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float) -> None:
    """Each tensor by itself, so that no large one hides a small one."""
    assert found.keys() == expected.keys()
    errors = {name: apart({name: found[name]}, {name: expected[name]}) for name in expected}
    off = {name: error for name, error in errors.items() if not error <= allowed}
    assert not off, off
