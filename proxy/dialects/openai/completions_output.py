"""A Completions answer, whole or streamed: texts, logprobs and usage."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.event_encoding import sse
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader, Tokens
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.openai.chat_output import error_body, usage_of
from agentrl.rendering import ContentDelta

NAMES = {"messages": "prompt"}
"""The dialect's names of parameters in errors."""


class CompletionsStream:
    """Encodes an answer as chunks of text. A choice's last chunk has the finish reason."""

    def __init__(self, request: ModelRequest, header: ResponseHeader) -> None:
        self._request = request
        self._header = header
        self._offsets = [0] * request.choices  # per choice: where the next token begins in its text

    def start(self) -> bytes:
        """The prompts, if `echo` is set."""
        if not self._request.wire.echo:
            return b""
        return b"".join(self._chunk(i, echoed(self._request, i)) for i in range(self._request.choices))

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """A chunk with the new text, and the logprobs of the new tokens if requested."""
        text = "".join(delta.text for delta in part.deltas if isinstance(delta, ContentDelta))
        logprobs = None
        if self._request.logprobs and part.tokens.ids:
            logprobs = logprobs_of(self._header, part.tokens, self._offsets[choice])
            self._offsets[choice] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return self._chunk(choice, text, logprobs=logprobs) if text or logprobs else b""

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The chunk with the finish reason."""
        return self._chunk(choice, "", answer.finish_reason, extras=extra_fields(self._request, answer))

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The usage, if requested, and `[DONE]`."""
        options = self._request.wire.stream_options
        usage = b""
        if options is not None and options.include_usage:
            usage = sse(completion_json(self._header, []) | {"usage": usage_of(self._header, answers)})
        return usage + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        """An error event, without `[DONE]`."""
        return sse(error_body(error, NAMES))

    def _chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None = None,
        *,
        logprobs: Json | None = None,
        extras: Json | None = None,
    ) -> bytes:
        return sse(completion_json(self._header, [choice_json(index, text, finish_reason, logprobs) | (extras or {})]))


def echoed(request: ModelRequest, choice: int) -> str:
    """The prompt that `echo` puts before a choice's text; empty without `echo`."""
    prompt = request.prompts[choice // request.n]
    return prompt if request.wire.echo and isinstance(prompt, str) else ""


def logprobs_of(header: ResponseHeader, tokens: Tokens, offset: int = 0) -> Json:
    """Completions' `logprobs`; `text_offset` counts the characters of the tokens' own texts from `offset`."""
    texts = [header.token_text(token) for token in tokens.ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": list(tokens.logprobs),
        "top_logprobs": _top(header, tokens, texts) if tokens.top is not None else None,
        "text_offset": offsets,
    }


def _top(header: ResponseHeader, tokens: Tokens, texts: Sequence[str]) -> list[dict[str, float]]:
    """For each token the most likely tokens, by text; the sampled token is always among them."""
    found = []
    for text, logprob, others in zip(texts, tokens.logprobs, tokens.top or [], strict=True):
        best: dict[str, float] = {}
        for other, token in others:
            best.setdefault(header.token_text(token), other)  # best first; parts of characters may have equal texts
        found.append({text: logprob} | best if text not in best else best)
    return found


def choice_json(index: int, text: str, finish_reason: str | None, logprobs: Json | None) -> Json:
    return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}


def completion_json(header: ResponseHeader, choices: list[Json]) -> Json:
    return {
        "id": f"cmpl-{header.id}",
        "object": "text_completion",
        "created": header.created,
        "model": header.model,
        "choices": choices,
    }


def extra_fields(request: ModelRequest, answer: Answer) -> Json:
    """The additions to OpenAI's choice: its interaction, and its exact tokens if requested."""
    extras: Json = {"interaction_id": answer.interaction_id} if request.choices > 1 else {}
    if request.wire.return_token_ids:
        extras |= {
            "prompt_token_ids": list(answer.prompt_ids),
            "token_ids": answer.tokens.ids,
            "token_logprobs": answer.tokens.logprobs,
            "weight_versions": answer.versions,
        }
    return extras
