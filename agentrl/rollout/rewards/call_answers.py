"""The answers of a session's main calls, for functions that judge every call (`per: call`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.domain.schemas import InteractionStatus, Json, Role
from agentrl.rollout.rewards.answers import answer_of


def call_answers(task: Json, calls: Sequence[Json], **about: Any) -> Iterator[tuple[str, Json]]:
    """(id, answer as `answer_of` builds it) of each delivered main call, in the order of `calls`, oldest first.

    `calls` are those of `GET /sessions/{id}/trace`. A call's conversation is that of its parent, what the agent added,
    and the answer; so no function sees what came after the call that it judges. `turn` counts main calls from 1.
    """
    conversations: dict[str, list[Json]] = {}
    sequences: dict[str, list[int]] = {}
    turn = 0
    for call in calls:
        if call["status"] != InteractionStatus.COMPLETE or call.get("answer") is None:
            continue
        parent = call["parent_id"]
        before = conversations[parent] if parent in conversations else call["system"]
        asked = [*before, *call["new_messages"]]
        prompt_ids = [*sequences.get(parent, []), *call["prompt_delta_ids"]]
        conversations[call["id"]] = [*asked, call["answer"]]
        sequences[call["id"]] = [*prompt_ids, *call["output_ids"]]
        if call["role"] != Role.MAIN:
            continue
        turn += 1
        choice = {"message": call["answer"], "finish_reason": call["finish_reason"], "token_ids": call["output_ids"]}
        yield (
            call["id"],
            answer_of(task, asked, {"choices": [choice], "prompt_token_ids": prompt_ids}, turn=turn, **about),
        )
