"""Answers sampled from a real SGLang server, and how far the trainer's logprobs of them are from the recorded ones."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.rendering import load_renderer
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.packing import Sample, collate, make_units

CLOSE = 1e-4
"""Mean |recorded − computed| logprob, in float32."""
ASKED = ["What is 12 plus 35?", "Write one line about the sea.", "List three colours.", "Say hello in French."]


async def sampled(url: str, model: Path, temperature: float) -> list[TrajectoryTokens]:
    """One answer to each question, straight from the server."""
    renderer = load_renderer(model)
    found = []
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        client = stack.enter_context(closing(SGLangClient(url, http)))
        for i, asked in enumerate(ASKED):
            prompt = renderer.render([{"role": "user", "content": asked}], None)
            params = {"max_new_tokens": 48, "ignore_eos": True, "temperature": temperature}
            chunks = [c async for c in client.generate(rid=uuid.uuid4().hex, input_ids=prompt, sampling_params=params)]
            output = [token for c in chunks for token in c.output_ids]
            ids = np.array([*prompt, *output], np.int32)
            own = np.arange(len(ids)) >= len(prompt)
            logprobs = np.zeros(len(ids), np.float32)
            logprobs[own] = [x for c in chunks for x in c.logprobs]
            found.append(
                TrajectoryTokens(
                    trajectory_id=f"t{i}",
                    session_id=f"s{i}",
                    episode_id=f"s{i}",
                    group_id="g",
                    input_ids=ids,
                    loss_mask=own,
                    logprobs=logprobs,
                    versions=np.where(own, 0, PROMPT_VERSION).astype(np.int32),
                    turn_ids=np.where(own, 0, -1).astype(np.int32),
                    temperatures=np.where(own, temperature, 1).astype(np.float32),
                    turn_returns=np.zeros(1),
                    episode_return=0.0,
                )
            )
    return found


def gaps(policy: Policy, found: list[TrajectoryTokens]) -> np.ndarray[Any, Any]:
    """|recorded − computed| logprob of all loss tokens."""
    samples = [Sample(t, np.zeros(len(t.input_ids), np.float32)) for t in found]
    batch = collate(make_units(samples, 4096))
    with torch.no_grad():
        computed_S = policy(batch)[0][batch.predictions_S]
    gaps_S: np.ndarray[Any, Any] = (computed_S - batch.behavior_S).abs().numpy()
    return gaps_S
