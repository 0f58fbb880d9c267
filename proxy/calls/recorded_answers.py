"""Rebuilds the answer of a recorded request from the store: parses the sampled tokens again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.model_call import response_header
from agentrl.proxy.calls.prompts.prompt_options import opening_of, parser_after
from agentrl.proxy.calls.sampling.stop_strings import Delivered
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.rendering import Delta, ToolCallDelta
from agentrl.store.calls import call_traces
from agentrl.store.db import codec, likeliest_codec


async def load(
    context: CallContext, session_id: str, request: ModelRequest, ids: list[str]
) -> tuple[ResponseHeader, list[tuple[int, AnswerDelta | Answer]]]:
    """The events of the answer to `request`, whose completed calls are `ids`, in the order of its choices."""
    tree = await context.trees.get(session_id, fresh=True)
    rows = await context.store.read(call_traces.outputs, ids)
    events: list[tuple[int, AnswerDelta | Answer]] = []
    prompt_ids: list[int] = []
    prompt_tokens = 0
    for choice, call_id in enumerate(ids):
        row = rows[call_id]
        if choice % request.n == 0:  # the answers to one prompt share it
            whole = tree.by_id[call_id].ids
            prompt_ids = whole[: len(whole) - row.output_tokens]
            prompt_tokens += len(prompt_ids)
        part, answer = _answer(context, request, prompt_ids, row)
        if request.stream:
            events.append((choice, part))
        events.append((choice, answer))
    return response_header(context, request, ids[0], rows[ids[0]].created_at, prompt_tokens), events


def _answer(context: CallContext, request: ModelRequest, prompt_ids: list[int], row: Any) -> tuple[AnswerDelta, Answer]:
    message: Json = codec.unpack_json(row.answer)
    output_ids = codec.unpack_ids(row.output_ids).tolist()
    top = None if row.top_logprobs is None else likeliest_codec.unpack(row.top_logprobs).rows
    tokens = Tokens(output_ids, codec.unpack_logprobs(row.logprobs).tolist(), top).best(request.top_logprobs)
    opening, _ = opening_of(context, request)
    parser = parser_after(context, request, prompt_ids[: len(prompt_ids) - len(opening)])
    delivered = Delivered(request.stop, one_call=not request.parallel_tool_calls)
    deltas = [delta for ids in (opening, output_ids) for delta in delivered.push(parser.push(ids))]
    deltas += delivered.finish(parser.finish()).deltas
    answer = Answer(
        interaction_id=row.id,
        message=message,
        finish_reason=row.finish_reason,
        stop=delivered.stop,
        prompt_ids=prompt_ids,
        cached_tokens=row.cached_tokens or 0,
        tokens=tokens,
        versions=row.spans,
    )
    return AnswerDelta([_as_then(delta, message) for delta in deltas], tokens), answer


def _as_then(delta: Delta, message: Json) -> Delta:
    """A delta with the recorded id of its tool call, in place of the new id that the parser made."""
    if isinstance(delta, ToolCallDelta) and delta.id is not None:
        return replace(delta, id=message["tool_calls"][delta.index]["id"])
    return delta
