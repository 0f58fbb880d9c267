"""Records complete calls whose tokens are given, for benchmarks that need runs without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from agentrl.domain.schemas import InteractionStatus, VersionSpan
from agentrl.domain.tokens import TokenIds
from agentrl.store import Connection
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.db import codec


def record_call(
    conn: Connection,
    run_id: str,
    session_id: str,
    *,
    prompt: Any,
    delta: Any,
    output: Sequence[int] | Any,
    logprobs: Any,
    parent: str | None = None,
) -> str:
    """Record a call that version 0 sampled; returns its id.

    `delta` is the part of the prompt after the parent's tokens. Ids are int32 arrays or lists; `logprobs` are float32,
    one for each token of the output.
    """
    call_id = codec.new_id()
    intent = call_intents.Intent(
        id=call_id,
        run_id=run_id,
        session_id=session_id,
        parent_id=parent,
        dialect="openai.chat",
        role="main",
        digest="d",
        replica="r",
        params={},
        temperature=1.0,
        tools=None,
        fork_reason=None,
        bridged=parent is not None,
        distribution_modified=False,
        trainable=True,
        prompt_tokens=len(prompt),
        prompt_digest=TokenIds(prompt).digest,
        created_at=time.time(),
    )
    call_intents.begin(conn, intent)
    outcome = call_outcomes.Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=call_id.encode(),
        new_messages=[{"role": "user", "content": "go on"}],
        answer={"role": "assistant", "content": "a long answer"},
        prompt_delta_ids=delta,
        output_ids=output,
        logprobs=logprobs,
        spans=[VersionSpan(version=0, start=0, end=len(output))],
        finish_reason="stop",
        engine_url="e",
        cached_tokens=0,
        first_token_at=None,
    )
    call_outcomes.finish(conn, call_id, session_id, outcome)
    return call_id
