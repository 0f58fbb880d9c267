"""Logprobs before top-k, top-p and min-p: samplers with vLLM's steps, changed as its own are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine.vllm import full_logprobs

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.5, 0.25]])
HALF = torch.tensor([0.5, 0.5])


def restrict(logits: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest token of each row."""
    return logits.masked_fill_(logits < logits.max(-1, keepdim=True).values, -torch.inf)


class FirstRunner:
    """The steps of the sampler of vLLM's V1 model runner."""

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)

    def sample(self, logits: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        scaled = logits.div_(metadata.temperature[:, None])
        if metadata.top_k is not None or any(each.min_p_count for each in metadata.logitsprocs.argmax_invariant):
            scaled = restrict(scaled)
        return scaled.argmax(-1), None if metadata.max_num_logprobs is None else self.compute_logprobs(scaled)


def metadata(*, top_k: Any = None, min_p: int = 0, logprobs: int | None = 0) -> Any:
    processors = [SimpleNamespace(min_p_count=min_p)]
    return SimpleNamespace(
        all_greedy=False,
        max_num_logprobs=logprobs,
        temperature=HALF,
        top_k=top_k,
        top_p=None,
        logitsprocs=SimpleNamespace(argmax_invariant=processors),
    )


full_logprobs.report(FirstRunner)


@pytest.mark.parametrize("restricted", [{}, {"top_k": 1}, {"min_p": 1}])
def test_the_first_model_runner_reports_the_whole_distribution(restricted: Any) -> None:
    sampled, found = FirstRunner().sample(LOGITS.clone(), metadata(**restricted))
    assert sampled.tolist() == [0, 1]
    torch.testing.assert_close(found, (LOGITS / 0.5).log_softmax(-1))


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    assert FirstRunner().sample(LOGITS.clone(), metadata(top_k=1, logprobs=None))[1] is None


class States:
    """The part of vLLM's sampling states that applies min-p."""

    def __init__(self, min_p: float) -> None:
        self.min_p = SimpleNamespace(np=np.full(2, min_p))

    def apply_min_p(self, logits: torch.Tensor, expanded: Any, rows: Any) -> None:
        if (self.min_p.np[rows] != 0.0).any():
            restrict(logits)


class SecondRunner:
    """The steps of the sampler of vLLM's V2 model runner, which returns logits."""

    def __init__(self, *, min_p: float = 0.0, top_k: Any = None) -> None:
        self.sampling_states, self.top_k = States(min_p), top_k

    def sample(self, logits: torch.Tensor, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits / HALF[:, None]
        self.sampling_states.apply_min_p(scaled, None, rows)
        return self._sample_random(scaled, None, rows, None, self.top_k, None, False)

    def _sample_random(
        self, logits: torch.Tensor, expanded: Any, rows: Any, pos: Any, top_k: Any, top_p: Any, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = restrict(logits) if top_k is not None else logits
        return logits.argmax(-1), logits


full_logprobs.report_on_gpu(SecondRunner, States)


@pytest.mark.parametrize("restricted", [{}, {"top_k": 1}, {"min_p": 0.9}, {"top_k": 1, "min_p": 0.9}])
def test_the_second_model_runner_reports_the_whole_distribution(restricted: Any) -> None:
    runner = SecondRunner(**restricted)
    for _ in range(2):
        sampled, found = runner.sample(LOGITS.clone(), np.array([0, 1]))
        assert sampled.tolist() == [0, 1]
        torch.testing.assert_close(found, LOGITS / 0.5)
