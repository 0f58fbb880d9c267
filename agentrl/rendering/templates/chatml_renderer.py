"""Renders ChatML for models without a tool format: `<|im_start|>role`, text, `<|im_end|>`.

Without tools, the bytes equal those of the model's template. Tools use call syntax (`call_syntax.py`): a line `Tools:
…` ends the system message, a call is assistant text, and a result is a turn with the role `tool`.

Message text is escaped: `<|im_end|>` in it does not end the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer

from agentrl.domain.schemas import ForkReason, Json
from agentrl.rendering.encoding.memo import EncodedTexts
from agentrl.rendering.encoding.text_decoding import text_decoder
from agentrl.rendering.encoding.units import units_encode
from agentrl.rendering.messages import function_of, role_of, text_of
from agentrl.rendering.options import known_options
from agentrl.rendering.parsing.call_syntax import CallReader, Signature, call_tag, signatures, tools_line, write_call
from agentrl.rendering.renderer import Bridge, ContentDelta, Delta, Opening, OutputParser, ToolCallDelta, new_call_id
from agentrl.rendering.templates.openings import chosen_names
from agentrl.rendering.templates.tokenizer_renderer import TokenizerRenderer

START = "<|im_start|>"
END = "<|im_end|>"


class ChatMLRenderer(TokenizerRenderer):
    """Renders and parses ChatML with a tokenizer only.

    Special tokens delimit each turn and are never merged, so the ids of a conversation are the concatenated ids of its
    turns. A bridge therefore equals a full rendering.
    """

    name = "chatml"
    reasons = False
    thinking_option: str | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        default_system: str | None = None,
        vocab_size: int | None = None,
        max_context: int | None = None,
    ) -> None:
        """`default_system` is the template's system message for conversations without one."""
        tokenizer.encode_special_tokens = True
        super().__init__(tokenizer, [special_id(tokenizer, END)], vocab_size, max_context)
        self._encode = EncodedTexts(units_encode(tokenizer))
        self._default_system = default_system
        self._start = special_id(tokenizer, START)
        (self._end,) = self.stop_token_ids
        self._newline = self._encode("\n")
        self._generation_prompt = [self._start, *self._encode("assistant\n")]

    def with_options(self, options: Json) -> ChatMLRenderer:
        """Raises for any option: the format has none."""
        known_options(options, (), self.name, reasons=False)
        return self

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """The prompt: all turns, then the generation prompt."""
        return self._turns(self._with_system(messages, tools), tools)

    def bridge(
        self,
        previous_ids: Sequence[int],
        messages_after: list[Json],
        tools: list[Json] | None,
        *,
        messages_before: list[Json] | None = None,
    ) -> Bridge:
        """The line break after the sampled `<|im_end|>`, the new turns, and the generation prompt."""
        if not previous_ids or previous_ids[-1] != self._end:
            return Bridge(None, ForkReason.TRUNCATED)
        return Bridge([*self._newline, *self._turns(messages_after, tools)])

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """A parser for the call syntax of `tools`."""
        return CallParser(self._tokenizer, self.stop_token_ids, signatures(tools))

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """An empty opening: the grammar covers the whole call."""
        names = chosen_names(tools, name)
        chosen = {function_of(tool)["name"]: tool for tool in tools if function_of(tool)["name"] in names}
        return Opening([], {"structural_tag": call_tag(list(chosen.values()))})

    def encode(self, text: str) -> list[int]:
        """Encode a raw prompt; special tokens in it are recognised."""
        return self._raw_tokenizer.encode(text).ids

    @cached_property
    def _raw_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self._tokenizer.to_str())  # the JSON leaves out `encode_special_tokens`

    def _with_system(self, messages: list[Json], tools: list[Json] | None) -> list[Json]:
        has_system = bool(messages) and role_of(messages[0]) == "system"
        given = text_of(messages[0]) if has_system else self._default_system
        if tools:
            given = f"{given}\n{tools_line(tools)}" if given else tools_line(tools)
        if given is None:
            return messages
        return [{"role": "system", "content": given}, *messages[has_system:]]

    def _turns(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        known = signatures(tools)
        ids: list[int] = []
        for message in messages:
            text = f"{role_of(message)}\n{turn_text(message, known)}"
            ids += [self._start, *self._encode(text), self._end, *self._newline]
        return ids + self._generation_prompt


class CallParser(OutputParser):
    """Parses content, or one tool call in call syntax."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: list[int], known: Mapping[str, Signature]) -> None:
        super().__init__(stop_token_ids)
        self._decoder = text_decoder(tokenizer)
        self._reader = CallReader(known)

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        yield ContentDelta(self._reader.push(self._decoder.push_run(ids)))

    def _end(self) -> Iterator[Delta]:
        yield ContentDelta(self._reader.push(self._decoder.flush()))
        match self._reader.finish():
            case (name, arguments):
                yield ToolCallDelta(0, new_call_id(), name, arguments)
            case str(text):
                yield ContentDelta(text)


def turn_text(message: Json, known: Mapping[str, Signature]) -> str:
    """The text of a turn: content, then one line per tool call."""
    calls = [write_call(call, known) for call in message.get("tool_calls") or []]
    content = text_of(message)
    return "\n".join([content, *calls] if content or not calls else calls)


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token, which must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return found
