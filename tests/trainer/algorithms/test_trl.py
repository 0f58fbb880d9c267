"""Where TRL computes the same quantity, its own loss method agrees.

The method is taken out of TRL's file, since importing it needs packages that nothing here does. It gets our logprobs
for those of a model.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from padded import Padded, random_batch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm

BATCH = {"proximal": "recompute", "correction": "none"}  # TRL weighs by the behaviour policy only with vLLM
LENGTH = 9


@cache
def trls(module: str, owner: str) -> Callable[..., Tensor]:
    """`_compute_loss` of one of TRL's trainers."""
    spec = find_spec("trl")
    assert spec is not None
    tree = ast.parse((Path(spec.origin).parent / "trainer" / f"{module}.py").read_text())
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    (method,) = (node for node in trainer.body if getattr(node, "name", "") == "_compute_loss")
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([method], []), f"{owner}._compute_loss", "exec"), names)
    return names["_compute_loss"]


def trl_loss(b: Padded, loss_type: str, **settings: Any) -> Tensor:
    """`GRPOTrainer._compute_loss` on a padded batch. It counts empty rows as sequences: give it none."""
    clip_high = settings.pop("epsilon_high", 0.2)
    args = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    ratio = settings.pop("importance_sampling_ratio", None)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=args,
        importance_sampling_level=settings.pop("level", "token"),
        beta=settings.pop("beta", 0.0),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=clip_high,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        accelerator=_Alone(),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        entropy_coef=settings.pop("entropy_coef", 0.0),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (b.logprobs, b.entropy, None),
    )
    assert not settings
    inputs = {
        "prompt_ids": torch.zeros(len(b.mask), 1),
        "prompt_mask": torch.ones(len(b.mask), 1),
        "completion_ids": torch.zeros(b.mask.shape),
        "completion_mask": b.mask.double(),
        "advantages": b.advantages,
        "old_per_token_logps": b.proximal,
        "ref_per_token_logps": b.reference,
        "num_items_in_batch": b.mask.sum().double(),
        "importance_sampling_ratio": ratio,
    }
    return trls("grpo_trainer", "GRPOTrainer")(trainer, None, inputs)


class _Alone:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: Tensor, **_: Any) -> Tensor:
        return values


def batch(seed: int, **settings: Any) -> Padded:
    b = random_batch(seed, **settings)
    b.mask[0, :2] = True
    return b


def assert_same(ours: Tensor, theirs: Tensor, b: Padded) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    (got,), (want,) = (torch.autograd.grad(loss, b.logprobs, retain_graph=True) for loss in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    assert got.any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "loss_type", "theirs"),
    [
        ({"preset": "grpo"}, "grpo", {}),
        ({"preset": "grpo", "kl_coef": 0.04}, "grpo", {"beta": 0.04}),
        ({"preset": "grpo", "clip_high": 0.3, "dual_clip": 1.5}, "grpo", {"epsilon_high": 0.3, "delta": 1.5}),
        ({"preset": "dr_grpo", "aggregation_tokens": LENGTH}, "dr_grpo", {}),
        ({"preset": "dapo"}, "dapo", {"epsilon_high": 0.28}),
        ({"preset": "dapo"}, "bnpo", {"epsilon_high": 0.28}),  # of one microbatch the same
        ({"preset": "dapo", "entropy_coef": 0.1}, "dapo", {"epsilon_high": 0.28, "entropy_coef": 0.1}),
        ({"preset": "cispo", "proximal": "recompute"}, "cispo", {"epsilon_high": 5.0}),
        ({"preset": "sapo"}, "sapo", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_trl_agrees(ours: dict[str, Any], loss_type: str, theirs: dict[str, Any], seed: int) -> None:
    b = batch(seed)
    loss, _ = b.loss(Algorithm(**BATCH | ours))
    assert_same(loss, trl_loss(b, loss_type, **theirs), b)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_trls_gspo_agrees_where_a_trajectory_has_one_advantage(seed: int, spread: float) -> None:
    b = batch(seed, whole_trajectories=True, spread=spread)
    loss, _ = b.loss(Algorithm(preset="gspo", correction="none", clip_low=0.2, clip_high=0.2))
    assert_same(loss, trl_loss(b, "grpo", level="sequence"), b)


@pytest.mark.parametrize("seed", range(3))
def test_trls_truncated_importance_sampling_agrees(seed: int) -> None:
    b = batch(seed)
    ratio = torch.exp(b.proximal - b.behavior).clamp(max=2.0)
    loss, _ = b.loss(Algorithm(correction_cap=2.0))
    assert_same(loss, trl_loss(b, "grpo", importance_sampling_ratio=ratio), b)


@pytest.mark.parametrize("seed", range(3))
def test_trls_rloo_agrees_where_a_trajectory_has_one_advantage(seed: int) -> None:
    b = batch(seed, whole_trajectories=True)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        accelerator=_Alone(),
        model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (b.logprobs, b.entropy, None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(b.mask), 1),
        "prompt_mask": torch.ones(len(b.mask), 1),
        "completion_ids": torch.zeros(b.mask.shape),
        "completion_mask": b.mask.double(),
        "advantages": b.advantages[:, 0],
        "old_logps": (b.proximal * b.mask).sum(1),
    }
    theirs = trls("rloo_trainer", "RLOOTrainer")(trainer, None, inputs)
    loss, _ = b.loss(Algorithm(preset="rloo", clip="ppo", correction="none"))
    assert_same(loss, theirs, b)
