"""Makes calls to record, with realistic sizes and a fixed seed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from agentrl.domain.schemas import InteractionStatus, Json, VersionSpan
from agentrl.domain.tokens import TokenIds
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.calls.call_intents import Intent
from agentrl.store.calls.call_outcomes import Outcome
from agentrl.store.db import codec

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
WORDS = ("the", "agent", "calls", "a", "tool", "reads", "its", "answer", "and", "writes", "it", "into", "some", "file")
VOCABULARY = 32_000


@dataclass(frozen=True)
class Call:
    """One call of a session, with the records that the proxy writes before and after sampling."""

    intent: Intent
    outcome: Outcome


def make_calls(run_id: str, session_ids: list[str], count: int, *, seed: int = 0) -> list[Call]:
    """`count` first calls, spread over the sessions."""
    rng = random.Random(seed)
    return [_call(rng, run_id, session_ids[i % len(session_ids)]) for i in range(count)]


def _call(rng: random.Random, run_id: str, session_id: str) -> Call:
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    output = [rng.randrange(VOCABULARY) for _ in range(OUTPUT_TOKENS)]
    intent = Intent(
        id=codec.new_id(),
        run_id=run_id,
        session_id=session_id,
        parent_id=None,
        dialect="openai.chat",
        role="main",
        digest=f"{rng.getrandbits(128):032x}",
        replica="proxy-0",
        params={"temperature": 1.0, "max_new_tokens": 256},
        temperature=1.0,
        tools=None,
        fork_reason=None,
        bridged=False,
        distribution_modified=False,
        trainable=True,
        prompt_tokens=len(prompt),
        prompt_digest=TokenIds(prompt).digest,
        created_at=time.time(),
    )
    outcome = Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=rng.randbytes(32),
        new_messages=[{"role": "user", "content": _text(rng, PROMPT_TOKENS)}],
        answer={"role": "assistant", "content": _text(rng, OUTPUT_TOKENS)},
        prompt_delta_ids=prompt,
        output_ids=output,
        logprobs=[-rng.expovariate(1.0) for _ in output],
        spans=[VersionSpan(version=0, start=0, end=len(output))],
        finish_reason="stop",
        engine_url="http://127.0.0.1:30000",
        cached_tokens=0,
        first_token_at=time.time(),
    )
    return Call(intent, outcome)


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


def packed(call: Call) -> Json:
    """The bulk columns as the store packs them."""
    return call_outcomes.data_row(call.intent.id, call.outcome)


def as_json(call: Call) -> Json:
    """The same columns as JSON text, for comparison with a store without packing."""
    outcome = call.outcome
    return {
        "interaction_id": call.intent.id,
        "new_messages": codec.json_text(outcome.new_messages),
        "answer": codec.json_text(outcome.answer),
        "prompt_delta_ids": codec.json_text(outcome.prompt_delta_ids),
        "output_ids": codec.json_text(outcome.output_ids),
        "logprobs": codec.json_text(outcome.logprobs),
        "spans": codec.json_text([[s.version, s.start, s.end] for s in outcome.spans]),
    }


def intent_row(call: Call) -> Json:
    """The intent as the columns that `call_intents.begin_many` writes."""
    return call_intents.intent_row(call.intent)
