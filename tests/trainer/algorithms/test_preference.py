"""The losses of pairs equal a plain implementation in float64, with their gradients, and TRL's own methods."""

from __future__ import annotations

import ast
import collections
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.trainer.algorithms.preference import bradley_terry_losses, dpo_losses, ipo_losses


def trls(module: str, owner: str, name: str) -> Any:
    """A method out of TRL's file, since importing it needs packages that nothing here does."""
    spec = find_spec("trl")
    assert spec is not None
    tree = ast.parse((Path(str(spec.origin)).parent / "trainer" / f"{module}.py").read_text())
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    (method,) = (node for node in trainer.body if getattr(node, "name", "") == name)
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
    exec(compile(ast.Module([method], []), f"{owner}.{name}", "exec"), names)
    return names[name]


ALONE = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device=torch.device("cpu"))


def metrics() -> dict[str, Any]:
    return {"train": collections.defaultdict(list)}


def trl_dpo(logprobs: Tensor, reference: Tensor, mask: Tensor, loss_type: str, beta: float) -> Tensor:
    """`DPOTrainer._compute_loss`: rows: chosen answers, then rejected ones; columns: tokens from the second."""
    outputs = SimpleNamespace(
        log_probs=logprobs * mask, entropy=logprobs.detach(), mean_logits=logprobs.detach(), is_top1=mask
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ALONE,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics=metrics(),
        _total_train_tokens=0,
        _tp_size=1,
        label_smoothing=0.0,
    )
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], 1)
    chosen, rejected = (reference * mask).sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(whole, dtype=torch.int64),
        "attention_mask": whole,
        "completion_mask": whole,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss: Tensor = trls("dpo_trainer", "DPOTrainer", "_compute_loss")(trainer, lambda **_: outputs, inputs, False)
    return loss


@pytest.fixture
def answers() -> tuple[Tensor, Tensor, Tensor]:
    """(6, 5) logprobs with gradient, reference logprobs, and masks: three pairs, of which one answer has one token."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
    reference = -3 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([5, 3, 1, 2, 4, 5])
    return logprobs.requires_grad_(), reference, torch.arange(5) < lengths[:, None]


def margins(answers: tuple[Tensor, Tensor, Tensor], *, per_token: bool = False) -> Tensor:
    logprobs, reference, mask = answers
    ratios = ((logprobs - reference) * mask).sum(1)
    chosen, rejected = (ratios / mask.sum(1) if per_token else ratios).chunk(2)
    return chosen - rejected


@pytest.mark.parametrize(("loss_type", "beta"), [("sigmoid", 0.1), ("sigmoid", 2.0), ("ipo", 0.1), ("ipo", 0.5)])
def test_dpo_equals_trls(answers: tuple[Tensor, Tensor, Tensor], loss_type: str, beta: float) -> None:
    if loss_type == "ipo":
        ours = ipo_losses(margins(answers, per_token=True), beta).mean()
    else:
        ours = dpo_losses(margins(answers), beta).mean()
    theirs = trl_dpo(*answers, loss_type, beta)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(loss, answers[0])[0] for loss in (ours, theirs)]
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_the_reward_models_loss_equals_trls() -> None:
    rewards = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ALONE,
        args=SimpleNamespace(center_rewards_coefficient=None),
        _metrics=metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(8, 1)}
    model = lambda **_: SimpleNamespace(logits=rewards[:, None])  # noqa: E731
    theirs = trls("reward_trainer", "RewardTrainer", "compute_loss")(trainer, model, inputs)
    chosen, rejected = rewards.chunk(2)
    ours = bradley_terry_losses(chosen - rejected).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, rewards)[0] for loss in (ours, theirs)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_values_and_slopes_by_their_formulas(smoothing: float) -> None:
    beta, h = 0.7, torch.tensor([-3.0, -0.2, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    losses = dpo_losses(h, beta, smoothing)
    (slopes,) = torch.autograd.grad(losses.sum(), h)
    for margin, loss, slope in zip(h.tolist(), losses.tolist(), slopes.tolist(), strict=True):
        right, wrong = sigmoid(beta * margin), sigmoid(-beta * margin)
        assert loss == pytest.approx(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong), abs=1e-12)
        assert slope == pytest.approx(beta * (smoothing * right - (1 - smoothing) * wrong), abs=1e-12)


def test_losses_of_large_margins_stay_finite() -> None:
    far = torch.tensor([-1e4, 1e4], requires_grad=True)
    losses = dpo_losses(far, 1.0, 0.1)
    (slopes,) = torch.autograd.grad(losses.sum(), far)
    assert losses.isfinite().all()
    assert slopes.isfinite().all()
