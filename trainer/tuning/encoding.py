"""Encodes messages to tokens as the proxy does: with the ids that it would record if the answers were sampled."""

from __future__ import annotations

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, UserError
from agentrl.rendering import Renderer
from agentrl.rendering.messages import role_of
from agentrl.rendering.renderer import places
from agentrl.rendering.validation import validate_messages, validate_tools
from agentrl.trainer.packing import Sample
from agentrl.trainer.tuning.items import make_sample


def encode(
    renderer: Renderer, messages: list[Json], tools: list[Json] | None = None, *, first: int = 0, name: str = "0"
) -> list[Sample]:
    """Samples that train each assistant message from `messages[first]` on exactly once.

    There is one sample when each turn extends the one before. Where the chat format rewrites earlier turns, for example
    drops their reasoning, the proxy would record a fork: a new sample begins there, with its whole prompt. Messages
    after the last assistant message are left out. Raises UserError that names the message.
    """
    try:
        validate_messages(messages)
        validate_tools(tools)
        return _encode(renderer, messages, tools, first, name)
    except RequestError as error:
        raise UserError(str(error)) from None


def _encode(renderer: Renderer, messages: list[Json], tools: list[Json] | None, first: int, name: str) -> list[Sample]:
    sequences: list[tuple[list[int], list[bool]]] = []
    done = 0  # how many messages the newest sequence covers
    for i in range(first, len(messages)):
        if role_of(messages[i]) != "assistant":
            continue
        if i == 0:
            raise UserError("messages[0]: an assistant message must answer an earlier message")
        prompt = renderer.render(messages[:i], tools)
        output = _output(renderer, messages[: i + 1], tools, prompt)
        delta = None
        if sequences:
            ids = sequences[-1][0]
            delta = renderer.bridge(ids, messages[done:i], tools, messages_before=messages[:done]).delta_ids
        if delta is None:
            sequences.append(([], []))
            delta = prompt
        ids, mask = sequences[-1]
        ids += [*delta, *output]
        mask += [*[False] * len(delta), *[True] * len(output)]
        done = i + 1
    if not sequences:
        raise UserError(
            f"messages: there is no assistant message to learn{f' from messages[{first}] on' * (first > 0)}"
        )
    return [make_sample(ids, mask, group=name, name=f"{name}.{k}") for k, (ids, mask) in enumerate(sequences)]


def _output(renderer: Renderer, messages: list[Json], tools: list[Json] | None, prompt: list[int]) -> list[int]:
    """The ids of the last message, with its stop token, as they follow the prompt."""
    whole = renderer.render(messages, tools)
    written = whole[len(prompt) :]
    stops = places(written, frozenset(renderer.stop_token_ids))
    if whole[: len(prompt)] != prompt or not stops:
        raise UserError(
            f"messages[{len(messages) - 1}]: the chat format does not write this turn after its own generation "
            "prompt, so its tokens cannot be separated from the prompt's"
        )
    return written[: stops[0] + 1]
