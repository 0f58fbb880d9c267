"""The logprobs of given tokens, which a server that teaches is asked for."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import numpy as np
import pytest

from agentrl.engine.sglang.sglang_scoring import SGLangScoring

from .servers import PROMPT, marked

SCORING = marked("fake", "sglang")


@pytest.mark.parametrize("url", SCORING, indirect=True)
async def test_given_tokens_are_scored_from_any_position(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        server = SGLangScoring(url, http)
        assert await server.model_path(60.0)
        whole = await server.score(PROMPT, 1, 60.0)
        assert whole.texts is None
        assert whole.logprobs.shape == (len(PROMPT) - 1,)
        assert (whole.logprobs <= 0).all()
        for start in (2, 9, len(PROMPT) - 1):
            part = await server.score(PROMPT, start, 60.0, texts=True)
            np.testing.assert_allclose(part.logprobs, whole.logprobs[start - 1 :], atol=1e-4)
            assert part.texts is not None
            assert len(part.texts) == len(PROMPT) - start


@pytest.mark.parametrize("url", marked("sglang"), indirect=True)
async def test_a_server_scores_as_the_model_does(url: str, tiny_model: Path) -> None:
    """At temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        every = torch.log_softmax(lm(input_ids=torch.tensor([PROMPT])).logits[0, :-1].double(), -1)
    expected = every.gather(1, torch.tensor(PROMPT)[1:, None])[:, 0].numpy()
    async with aiohttp.ClientSession() as http:
        scored = await SGLangScoring(url, http).score(PROMPT, 1, 60.0)
    np.testing.assert_allclose(scored.logprobs, expected, atol=1e-3)
