"""Adapts one model family of the `renderers` package to `Renderer`, with OpenAI's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from agentrl.domain.schemas import ForkReason, Json
from agentrl.errors import RequestError
from agentrl.rendering.encoding.units import units_encode
from agentrl.rendering.messages import function_of
from agentrl.rendering.options import CAPACITY, known_options, spelled, thinking_option
from agentrl.rendering.parsing.parser_choice import FAMILIES, output_parser
from agentrl.rendering.renderer import Bridge, Opening, OutputParser
from agentrl.rendering.templates.chat_template import for_template
from agentrl.rendering.templates.model_folder import ModelFolder
from agentrl.rendering.templates.openings import Openings
from agentrl.rendering.templates.tokenizer_renderer import TokenizerRenderer

_TALK: list[Json] = [{"role": "user", "content": "x"}]
TAIL = 8  # more tokens than a prompt has after the marker that opens its reasoning
_THOUGHT = "§"
_CALL: Json = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_THOUGHTFUL: list[Json] = [
    {"role": "assistant", "content": "x", "reasoning_content": _THOUGHT},
    {"role": "assistant", "content": "", "reasoning_content": _THOUGHT, "tool_calls": [_CALL]},
]

Make = Callable[[Json], "FamilyRenderer"]

# The exceptions that families raise for unsupported messages.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


class FamilyRenderer(TokenizerRenderer):
    """Renders one family. Bridges with the library's own bridge, else by rendering the whole conversation."""

    def __init__(
        self,
        name: str,
        inner: Any,
        keeping: Any,
        tokenizer: Tokenizer,
        folder: ModelFolder,
        make: Make,
        known: set[str],
    ) -> None:
        """`inner` and `keeping` are the library's renderers over `tokenizer`; `keeping` never drops reasoning.

        `make` creates the family with options; `known` are the options that it supports.
        """
        super().__init__(tokenizer, inner.get_stop_token_ids(), folder.vocab_size, folder.max_context)
        self.name = name
        self._inner = inner
        self._keeping = keeping
        self._generation_prompt = self.render(_TALK, None)[len(self._write(_TALK, None)) :]
        self._reads = FAMILIES[name]
        self._opens_reasoning = self._in_reasoning(self._generation_prompt)
        replies = (self.decode(self._write([*_TALK, reply], None)) for reply in _THOUGHTFUL)
        self.reasons = self._opens_reasoning or any(_THOUGHT in reply for reply in replies)
        self._known = known
        self.thinking_option = thinking_option(known)
        self._with_options = lru_cache(CAPACITY)(lambda options: make(json.loads(options)))
        self._openings = Openings(self, self._write, self._encode, self._reads, tokenizer)

    def with_options(self, options: Json) -> FamilyRenderer:
        """The family with the given options."""
        known = known_options(options, self._known, self.name, reasons=self.reasons)
        return self._with_options(spelled(known)) if known else self

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """Render the prompt. Raises RequestError for a message that the family does not support."""
        return self._write(messages, tools, generation_prompt=True)

    def bridge(
        self,
        previous_ids: Sequence[int],
        messages_after: list[Json],
        tools: list[Json] | None,
        *,
        messages_before: list[Json] | None = None,
    ) -> Bridge:
        """Extend the last turn with the library's bridge, checked to start with that turn.

        If the library has no bridge, render the whole conversation. The result is valid if it extends `previous_ids`
        exactly, or if only the end of the history differs and no reasoning was dropped.
        """
        if not previous_ids or previous_ids[-1] not in self.stop_token_ids:
            return Bridge(None, ForkReason.TRUNCATED)
        if any(message["role"] == "assistant" for message in messages_after):
            return Bridge(None, ForkReason.HISTORY_EDITED)  # a reply that was not sampled
        before = messages_before or []
        prompt, output = self._last_turn(list(previous_ids))
        turn = (prompt, output, self._plain(messages_after, before), tools)
        delta = _extension(self._inner, *turn)
        if delta is not None:
            return Bridge(delta)
        if not before:
            return Bridge(None, ForkReason.TEMPLATE_REWROTE)
        whole = self.render([*before, *messages_after], tools)
        if whole[: len(previous_ids)] == list(previous_ids):
            return Bridge(whole[len(previous_ids) :])
        if _extension(self._keeping, *turn) is not None:
            return Bridge(None, ForkReason.REASONING_DROPPED)
        history, closed = self._write(before[:-1], tools), self._write(before, tools)
        end = previous_ids[-1]
        if end not in closed[len(history) :] or whole[: len(closed)] != closed:
            return Bridge(None, ForkReason.TEMPLATE_REWROTE)
        behind = closed[::-1].index(end)  # how many ids the format writes behind a reply's end
        return Bridge(whole[len(closed) - behind :])

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """A parser of the family's format."""
        opened = self._in_reasoning(prompt_ids[-TAIL:])
        return output_parser(
            self._reads, self._tokenizer, self.stop_token_ids, tools, prompt_ids, in_reasoning=opened, trims=True
        )

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """The ids before a call's name, or before its arguments."""
        return self._openings.of(tools, name)

    def _write(self, messages: list[Json], tools: list[Json] | None, *, generation_prompt: bool = False) -> list[int]:
        try:
            ids: list[int] = self._inner.render_ids(
                self._plain(messages, []), tools=tools or None, add_generation_prompt=generation_prompt
            )
        except _REFUSALS as error:
            raise RequestError(
                400, f"the chat format {self.name!r} refuses these messages: {error}", code="invalid_messages"
            ) from error
        return ids

    def _plain(self, messages: list[Json], before: list[Json]) -> list[Json]:
        """Convert messages for the library: arguments as values, and tool results with their tool's name."""
        plain = [for_template(message) for message in messages]
        names: dict[Any, str] = {}  # call id → tool name; of equal ids, the last
        for message in before:
            names |= _names_of_calls(message)
        for message in plain:
            if message["role"] == "tool" and not message.get("name"):
                message["name"] = names.get(message.get("tool_call_id"), "tool")
            names |= _names_of_calls(message)
        return plain

    def _in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside opened reasoning."""
        return self.decode(prompt_ids).rstrip().endswith(self._reads.think[0].rstrip())

    def _last_turn(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """The last generation prompt and the ids after it, which is all that the library needs."""
        part = self._generation_prompt
        for start in reversed(range(len(ids))):
            if ids[start] == part[0] and ids[start : start + len(part)] == part:
                return part, ids[start + len(part) :]
        return ids[:1], ids[1:]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` with the interface that `renderers` expects."""

    def __init__(self, tokenizer: Tokenizer, folder: ModelFolder) -> None:
        self.wrapped = tokenizer
        self._encode = units_encode(tokenizer)
        self.name_or_path = str(folder.config.get("_name_or_path") or folder.path)
        self.unk_token_id = self._id(folder.special_tokens.get("unk_token"))
        self.eos_token_id = self._id(folder.special_tokens.get("eos_token"))
        self.chat_template = folder.template.source if folder.template else None

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Encode a text; special tokens in it are recognised."""
        if not add_special_tokens:
            return self._encode(text)
        return self.wrapped.encode(text).ids

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Encode with character offsets."""
        encoded = self.wrapped.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode one id or several."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.wrapped.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Ids of tokens by name, with the unknown token's id for others."""
        if isinstance(tokens, str):
            found = self.wrapped.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.wrapped.token_to_id(token)


def _extension(
    library: Any, prompt: list[int], output: list[int], messages: list[Json], tools: list[Json] | None
) -> list[int] | None:
    """The ids that the library adds after `prompt` and `output`; None if it has no bridge or rewrites these ids."""
    extended = library.bridge_to_next_turn(prompt, output, messages, tools=tools or None)
    previous = [*prompt, *output]
    if extended is None or extended.token_ids[: len(previous)] != previous:
        return None
    delta: list[int] = extended.token_ids[len(previous) :]
    return delta


def _names_of_calls(message: Json) -> dict[Any, str]:
    """The tools called in a message, by call id; the first for a repeated id."""
    return {call["id"]: function_of(call)["name"] for call in reversed(message.get("tool_calls") or [])}
