"""What transformers computes, in float32, for answers that an engine has sampled."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import Adapter
from agentrl.engine.engine_client import EngineClient

# <|im_start|>user\nabcd<|im_end|>\n<|im_start|>assistant\n with the tiny model's byte tokens
PROMPT = [1, 87, 85, 71, 84, 201, 67, 68, 69, 70, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]


@dataclass(frozen=True)
class Answer:
    """An answer of an engine to PROMPT."""

    ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    reason: str | None
    stop: int | str | None
    temperature: float


async def ask(client: EngineClient, params: Json, adapter: Adapter | None = None) -> Answer:
    """Sample an answer."""
    stream = client.generate(rid=uuid.uuid4().hex, input_ids=PROMPT, sampling_params=params, adapter=adapter)
    chunks = [chunk async for chunk in stream]
    return Answer(
        ids=[token for chunk in chunks for token in chunk.output_ids],
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
        spans=chunks[-1].versions or [],
        reason=chunks[-1].finish_reason,
        stop=chunks[-1].matched_stop,
        temperature=params.get("temperature", 1.0) or 1.0,
    )


def model(folder: Path) -> Any:
    """The model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def gap(reference: Any, answer: Answer, start: int = 0, end: int | None = None) -> float:
    """The largest |sampled − computed| logprob of an answer's tokens from `start` to `end`."""
    ids = torch.tensor([PROMPT + answer.ids])
    logits = reference(ids).logits[0, len(PROMPT) - 1 : -1] / answer.temperature
    computed = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    return (computed - torch.tensor(answer.logprobs))[start:end].abs().max().item()
