"""Samples a few tokens of an engine and says what is wrong with them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.domain.schemas import Json
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient

TOKENS = 4
PROMPT = tuple(range(1, 9))
"""Ids that every vocabulary has."""
WARM, COLD = 1.0, 0.5
"""Temperatures. At the second one, logprobs are twice as far apart."""
LIKELIEST = 5
LEAST_SPREAD = 0.2
"""The least spread of the likeliest tokens' logprobs, in nats. Below it, noise hides the effect of the temperature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """An answer of at most TOKENS tokens. `ids` and `logprobs` share one length."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # (version, start, end)
    follows_temperature: bool | None = None  # None: the distribution is too flat to say
    problems: list[str] = field(default_factory=list)


async def probe(client: EngineClient, version: int | None, timeout_s: float) -> Probe:
    """Sample twice, at two temperatures. `version` is the one that the engine reports. Raises EngineError."""
    warm = await _sampled(client, WARM, timeout_s)
    cold = await _sampled(client, COLD, timeout_s)
    ids = [token for chunk in warm for token in chunk.output_ids]
    logprobs = [logprob for chunk in warm for logprob in chunk.logprobs]
    spans = [(span.version, span.start, span.end) for span in warm[-1].versions or ()]
    follows = scales(spread(warm), spread(cold))
    problems = [
        text
        for text, found in {
            f"it sampled {len(ids)} tokens instead of {TOKENS}": len(ids) != TOKENS,
            "it sampled a negative token id": any(token < 0 for token in ids),
            "it reports logprobs that are not those of a token": not all(map(_is_logprob, logprobs)),
            f"its tokens have versions {spans}, but it reports {version}": {span[0] for span in spans} != {version},
        }.items()
        if found
    ]
    return Probe(ids=ids, logprobs=logprobs, spans=spans, follows_temperature=follows, problems=problems)


async def _sampled(client: EngineClient, temperature: float, timeout_s: float) -> list[Chunk]:
    params: Json = {"max_new_tokens": TOKENS, "temperature": temperature, "ignore_eos": True}
    stream = client.generate(
        rid=uuid.uuid4().hex,
        input_ids=PROMPT,
        sampling_params=params,
        timeout_s=timeout_s,
        top_logprobs=LIKELIEST,
    )
    return [chunk async for chunk in stream]


def spread(chunks: Sequence[Chunk]) -> float | None:
    """How far apart the logprobs of the first position's likeliest tokens are; None if they are not reported."""
    rows = [row for chunk in chunks for row in chunk.top_logprobs or ()]
    found = sorted(logprob for logprob, _ in rows[0]) if rows else []
    return found[-1] - found[0] if len(found) > 1 else None


def scales(warm: float | None, cold: float | None) -> bool | None:
    """Whether logits are divided by the temperature, from the spread of logprobs at both; None if it does not say.

    log softmax(z / T)ᵢ − log softmax(z / T)ⱼ = (zᵢ − zⱼ) / T
    """
    if warm is None or cold is None or warm < LEAST_SPREAD:
        return None
    expected = warm * WARM / COLD
    return abs(cold - expected) < abs(cold - warm)


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= 0
