"""A teacher's distributions, a policy's divergence from them, and teachers that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import save_tiny_model
from torch import Tensor

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import UserError
from agentrl.trainer.distributed import World
from agentrl.trainer.models import head, mechanisms
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.models.teacher import Lesson, divergence_from

TEMPERATURES = torch.linspace(0.6, 1.4, 10)


def exact(own: Tensor, other: Tensor, top_k: int | None) -> Tensor:
    """(P,) KL(own ‖ other) of logits over the ids that both have, or over the k largest of `other`."""
    both = min(own.shape[1], other.shape[1])
    own, other = own[:, :both], other[:, :both]
    if top_k is not None:
        ids = other.topk(min(top_k, both)).indices
        own, other = own.gather(1, ids), other.gather(1, ids)
    log_p, log_q = torch.log_softmax(own, -1), torch.log_softmax(other, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("top_k", [None, 5, 1000])
@pytest.mark.parametrize("vocabularies", [(50, 50), (50, 64), (64, 50)])
@pytest.mark.parametrize("trained_head", [False, True])
def test_the_divergence_equals_that_of_whole_logits(
    trained_head: bool, vocabularies: tuple[int, int], top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK", 3)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8), torch.randn(vocabularies[0], 8, requires_grad=trained_head)
    teacher_hidden, teacher_weight = torch.randn(10, 6), torch.randn(vocabularies[1], 6)
    upstream = torch.randn(10)
    hidden.requires_grad_()
    lesson = Lesson(teacher_hidden, teacher_weight, TEMPERATURES, "reverse", top_k)
    found = divergence_from(lesson, hidden, weight, TEMPERATURES)
    (found * upstream).sum().backward()

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    own = exact_hidden @ exact_weight.T / TEMPERATURES.double()[:, None]
    other = teacher_hidden.double() @ teacher_weight.double().T / TEMPERATURES.double()[:, None]
    expected = exact(own, other, top_k)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=1e-5)
    if trained_head:
        torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)
    else:
        assert weight.grad is None


def test_a_teacher_that_reads_other_batches_is_refused(
    tiny_model: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_tiny_model(tmp_path / "other", hidden_size=16)
    config = TrainerConfig(algorithm={"distill_coef": 1.0}, teacher=str(other))
    monkeypatch.setattr("agentrl.trainer.models.run_models.resolve_model", Path)
    monkeypatch.setattr("agentrl.trainer.models.run_models.check_same_tokens", lambda *_: None)
    (teacher,) = make_models(tiny_model, config, world).teachers.values()
    assert teacher.lm.config.hidden_size == 16
    monkeypatch.setattr(mechanisms, "unpackable", lambda lm: "a test" if lm.config.hidden_size == 16 else "")
    with pytest.raises(UserError, match=r"trainer\.teacher: .* read batches in different ways: a test"):
        make_models(tiny_model, config, world)
