"""The servers under contract, and calls of them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from agentrl.domain.schemas import Json
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient

# <|im_start|>user\nabcd<|im_end|>\n<|im_start|>assistant\n with the tiny model's byte tokens
PROMPT = [1, 87, 85, 71, 84, 201, 67, 68, 69, 70, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
LONG: Json = {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 1.0}
SERVERS = {"fake": "sglang", "fake-cumulative": "sglang", "fake-vllm": "vllm", "sglang": "sglang", "vllm": "vllm"}
"""Server under test → its backend. A new backend is a new entry, and a new branch of `url` in conftest.py."""
NO_TENSORS = frozenset({"vllm", "fake-vllm"})
"""The servers that take weights only from a folder."""
NO_PREPARATION = frozenset({"vllm", "fake-vllm"})
"""The servers that prepare no versions while they serve."""
NO_RELEASE = frozenset({"vllm", "fake-vllm"})
"""The servers that keep their memory."""
MARKS = {"sglang": pytest.mark.engine, "vllm": pytest.mark.vllm}
"""The marks of tests on real servers."""


def marked(*names: str) -> list[Any]:
    """The servers of these names as parameters of a test."""
    return [pytest.param(name, marks=[MARKS[name]] if name in MARKS else []) for name in sorted(names)]


def rid() -> str:
    return uuid.uuid4().hex


async def collect(client: EngineClient, params: Json, ids: list[int] = PROMPT, name: str | None = None) -> list[Chunk]:
    return [chunk async for chunk in client.generate(rid=name or rid(), input_ids=ids, sampling_params=params)]


def n_tokens(chunks: list[Chunk]) -> int:
    return sum(len(chunk.output_ids) for chunk in chunks)
