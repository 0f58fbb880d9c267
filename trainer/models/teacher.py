"""What a policy's distributions are compared with: those of a frozen model beside the policy, or recorded ones.

Letters as in head.py: P predictions, H hidden size, V vocabulary, C predictions of one chunk. K: recorded tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.trainer.algorithms.vocabulary_divergence import DIVERGENCES, Divergence, recorded_kl
from agentrl.trainer.models.head import chunk_of, chunks, head_of, logits_of
from agentrl.trainer.models.onednn import add_weight_gradient, linear

Measure = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""(which predictions, the policy's logits / temperature there (C, V)) → the divergence (C,), and its derivatives by
these logits (C, V).
"""


class AnyLesson(Protocol):
    """Distributions at predictions of a microbatch, with which the policy's are compared."""

    @property
    def own_Q(self) -> Tensor | None:
        """int64, the policy's predictions that are compared; None: all, in order."""

    @property
    def heat_P(self) -> Tensor | None:
        """Temperatures at which they are compared; None: those of the predictions."""

    @property
    def vocabulary(self) -> int:
        """Logits of a prediction that are needed beside the policy's."""

    def measure(self) -> Measure:
        """How they are compared, chunk by chunk."""


def divergence_from(lesson: AnyLesson, hidden_PH: Tensor, weight_VH: Tensor, temperatures_P: Tensor) -> Tensor:
    """(P,) the divergence of the policy's distributions, with a gradient by its hidden states and its head."""
    found: Tensor = _Compared.apply(hidden_PH, weight_VH, temperatures_P, lesson)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """The likeliest tokens of the model that sampled, as they were recorded. Ids below 0 fill up rows."""

    ids_PK: Tensor
    logprobs_PK: Tensor
    own_Q: Tensor
    heat_P: Tensor

    @property
    def vocabulary(self) -> int:
        """Nothing beside the policy's logits."""
        return 0

    def measure(self) -> Measure:
        """By the forward KL divergence."""
        return lambda part, logits_CV: recorded_kl(logits_CV, self.ids_PK[part], self.logprobs_PK[part])


@dataclass(frozen=True, slots=True)
class Lesson:
    """A teacher's distributions at the predictions of a microbatch, as their factors."""

    hidden_PH: Tensor
    weight_VH: Tensor
    temperatures_P: Tensor
    divergence: str
    top_k: int | None
    own_Q: Tensor | None = None
    heat_P: Tensor | None = None

    @property
    def vocabulary(self) -> int:
        """The teacher's."""
        return len(self.weight_VH)

    def measure(self) -> Measure:
        """By the configured divergence."""
        head_VH = head_of(self.weight_VH)

        def measured(part: slice, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
            teacher_CV = logits_of(self.hidden_PH[part], head_VH).div_(self.temperatures_P[part, None])
            return compared(logits_CV, teacher_CV, DIVERGENCES[self.divergence], self.top_k)

        return measured


def compared(logits_CV: Tensor, teacher_CV: Tensor, measure: Divergence, top_k: int | None) -> tuple[Tensor, Tensor]:
    """(C,) the divergence of softmax(logits) from softmax(teacher), and (C, V) its derivatives by the logits.

    Models of one tokenizer may pad their heads to different sizes: the ids that both have are compared. With `top_k`,
    only the teacher's k largest, both distributions restricted to them.
    """
    both = min(logits_CV.shape[1], teacher_CV.shape[1])
    slope_CV = torch.zeros_like(logits_CV)
    if top_k is None or top_k >= both:
        parts = (torch.log_softmax(z[:, :both], -1) for z in (logits_CV, teacher_CV))
        found_C, slope_CV[:, :both] = measure(*parts)
        return found_C, slope_CV
    ids_CK = teacher_CV[:, :both].topk(top_k).indices
    parts = (torch.log_softmax(z.gather(1, ids_CK), -1) for z in (logits_CV, teacher_CV))
    found_C, slope_CK = measure(*parts)
    return found_C, slope_CV.scatter_(1, ids_CK, slope_CK)


class _Compared(torch.autograd.Function):
    """Computes logits in chunks, once for the divergence and once for its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_PH: Tensor, weight_VH: Tensor, temperatures_P: Tensor, lesson: AnyLesson) -> Tensor:
        ctx.save_for_backward(hidden_PH, weight_VH, temperatures_P)
        ctx.lesson = lesson
        found_P = torch.empty(len(hidden_PH), dtype=torch.float32, device=hidden_PH.device)
        for part, found_C, _ in _parts(hidden_PH, weight_VH, temperatures_P, lesson):
            found_P[part] = found_C
        return found_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, temperatures_P = ctx.saved_tensors
        grad_P = grads[0] / temperatures_P
        grad_PH = torch.empty_like(hidden_PH)
        grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part, _, slope_CV in _parts(hidden_PH, weight_VH, temperatures_P, ctx.lesson):
            slope_CV = slope_CV.mul_(grad_P[part, None]).to(weight_VH.dtype)
            grad_PH[part] = linear(slope_CV, weight_VH.t())
            if grad_VH is not None:
                add_weight_gradient(grad_VH, slope_CV, hidden_PH[part])
        return grad_PH, None if grad_VH is None else grad_VH.to(weight_VH.dtype), None, None


def _parts(hidden_PH: Tensor, weight_VH: Tensor, temperatures_P: Tensor, lesson: AnyLesson) -> Any:
    """For each chunk of predictions: where it is, its divergence, and its derivatives by the logits / temperature."""
    head_VH, measure = head_of(weight_VH), lesson.measure()
    for part in chunks(len(hidden_PH), chunk_of(2 * max(len(weight_VH), lesson.vocabulary))):
        logits_CV = logits_of(hidden_PH[part], head_VH).div_(temperatures_P[part, None])
        yield part, *measure(part, logits_CV)
