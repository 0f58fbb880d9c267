"""Messages to tokens, by the proxy's own steps: the ids are those that it would record, were the answers sampled."""

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

    One, where each turn extends the one before. Where the chat format rewrites earlier turns (drops their reasoning,
    say), the proxy would record a fork: a sample of its own begins there, with its whole prompt before it. What follows
    the last such message is left out. Raises UserError naming the message.
    """
    try:
        validate_messages(messages)
        validate_tools(tools)
        return _encode(renderer, messages, tools, first, name)
    except RequestError as error:
        raise UserError(str(error)) from None


def _encode(renderer: Renderer, messages: list[Json], tools: list[Json] | None, first: int, name: str) -> list[Sample]:
    sequences: list[tuple[list[int], list[bool]]] = []
    done = 0  # messages that the newest sequence stands for
    for i in range(first, len(messages)):
        if role_of(messages[i]) != "assistant":
            continue
        if i == 0:
            raise UserError("messages[0]: an assistant's message has nothing to answer")
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
            f"messages: there is no assistant's message to learn{f' from messages[{first}] on' * (first > 0)}"
        )
    return [make_sample(ids, mask, group=name, name=f"{name}.{k}") for k, (ids, mask) in enumerate(sequences)]


def _output(renderer: Renderer, messages: list[Json], tools: list[Json] | None, prompt: list[int]) -> list[int]:
    """The ids of the last message, its stop token included, as they follow the prompt before it."""
    whole = renderer.render(messages, tools)
    written = whole[len(prompt) :]
    stops = places(written, frozenset(renderer.stop_token_ids))
    if whole[: len(prompt)] != prompt or not stops:
        raise UserError(
            f"messages[{len(messages) - 1}]: the chat format does not write this turn behind its own generation "
            "prompt, so that its tokens cannot be told from the prompt's"
        )
    return written[: stops[0] + 1]
