"""The generic renderer: any chat template, bridged only where its prefix stability is proven call by call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from agentrl.errors import RequestError
from agentrl.rendering.base import Bridge, Opening, OutputParser
from agentrl.rendering.folder import ModelFolder
from agentrl.rendering.markup import CALL, END_CALL, END_THINK, THINK, MarkupParser
from agentrl.rendering.memo import RenderedTexts
from agentrl.rendering.messages import parse_arguments, role_of
from agentrl.rendering.openings import Openings
from agentrl.rendering.text import TextParser, decode
from agentrl.rendering.units import units_encode
from agentrl.schemas import ForkReason, Json

_TALK: list[Json] = [{"role": "user", "content": "x"}]

UNSETTLED = 4  # tokens at the end of a text that more text may change

REWROTE = Bridge(None, ForkReason.TEMPLATE_REWROTE)


class TemplateRenderer:
    """Renders with the folder's own template. Special tokens spelled in messages count, as the template's do.

    Outputs are parsed as Hermes: `<tool_call>` and `<think>` where the template itself uses them. Tools for a template
    without `<tool_call>` are refused, because their calls could not be read.
    """

    name = "template"

    def __init__(self, folder: ModelFolder) -> None:
        """`folder` must have a chat template."""
        assert folder.template is not None
        self._template = folder.template
        self._tokenizer = tokenizer = folder.tokenizer()
        self._encode = units_encode(tokenizer)
        eos = tokenizer.token_to_id(folder.special_tokens.get("eos_token", ""))
        self.stop_token_ids = sorted({*folder.eos_token_ids, *([] if eos is None else [eos])})
        self.vocab_size = folder.vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_context = folder.max_context
        self.reasons = END_THINK in folder.template.source
        self._texts = RenderedTexts()
        self._openings = Openings(self, self._write_reply, self._encode)

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """The template's own text, encoded. Raises RequestError where the template refuses the conversation."""
        text = self._text(messages, tools)
        self._texts.put(messages, tools, text)
        return self._encode(text)

    def bridge(
        self,
        previous_ids: Sequence[int],
        messages_after: list[Json],
        tools: list[Json] | None,
        *,
        messages_before: list[Json] | None = None,
    ) -> Bridge:
        """What the template writes after the reply's end, if all that it writes before is what it wrote then.

        Proof: the whole conversation's text begins with the text of the earlier prompt, and up to its first reply with
        its very ids; the reply's turn that follows is what was sampled, or reads the same, or is what the template made
        of the reply when it was the last message; and no sampled reasoning has gone. Without `messages_before` nothing
        is proven.
        """
        if not previous_ids or previous_ids[-1] not in self.stop_token_ids:
            return Bridge(None, ForkReason.TRUNCATED)
        if not messages_before:
            return REWROTE
        *history, reply = messages_before
        if role_of(reply) != "assistant":
            return Bridge(None, ForkReason.HISTORY_EDITED)

        head = self._texts.get(history, tools) or self._text(history, tools)
        generation_prompt = self._generation_prompt_of(head, history, tools)
        output = _behind_last(self._encode(generation_prompt), previous_ids)
        sampled, end = self.decode(output), self.decode(output[-1:])
        reasoning = _reasoning(sampled)
        thoughtful = {"reasoning_content": reasoning} | reply if reasoning else reply
        whole = self._text([*history, thoughtful, *messages_after], tools)
        if thoughtful == reply:
            self._texts.put([*messages_before, *messages_after], tools, whole)
        if not output or not self._begins(whole.partition(generation_prompt)[0], previous_ids):
            return REWROTE

        turn, found, delta = whole.removeprefix(head).partition(end)
        written = head + turn + end
        stable = bool(found) and whole.startswith(head) and reasoning in turn
        if stable and (sampled == turn + end or self._message(head, self._encode(turn)) == self._message(head, output)):
            return self._extension(end, delta, previous_ids)
        alone = self._text([*history, thoughtful], tools, generation_prompt=False)
        closing = alone.removeprefix(written)
        if stable and alone.startswith(written) and not closing.strip() and delta.startswith(closing):
            return self._extension(end, delta, previous_ids)
        if self.reasons and not whole.startswith(alone) and _no_reasoning(whole).startswith(_no_reasoning(alone)):
            return Bridge(None, ForkReason.REASONING_DROPPED)
        return REWROTE

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """A Hermes parser for the markers that the template and the request use."""
        return self._parser(
            [THINK, END_THINK] * self.reasons + [CALL, END_CALL] * bool(tools), self.decode(prompt_ids[-8:])
        )

    def text_parser(self) -> OutputParser:
        """A parser that reads no markup."""
        return TextParser(self._tokenizer, self.stop_token_ids)

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """What the template writes before a call's name, or before its arguments."""
        return self._openings.of(tools, name)

    def encode(self, text: str) -> list[int]:
        """A raw prompt, with what the tokenizer puts first."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return decode(self._tokenizer, ids)

    def _generation_prompt_of(self, head: str, history: list[Json], tools: list[Json] | None) -> str:
        if self._usual_generation_prompt and head.endswith(self._usual_generation_prompt):
            return self._usual_generation_prompt
        return head.removeprefix(self._text(history, tools, generation_prompt=False))

    @cached_property
    def _usual_generation_prompt(self) -> str:
        try:
            return self._text(_TALK, None).removeprefix(self._text(_TALK, None, generation_prompt=False))
        except RequestError:  # a template that wants another conversation
            return ""

    def _message(self, prompt: str, output: Sequence[int]) -> tuple[str, str, list[tuple[str, Any]]]:
        """How an output reads, layout aside: content, reasoning, calls."""
        parser = self._parser([THINK, END_THINK] * self.reasons + [CALL, END_CALL], prompt)
        parser.push(output)
        parsed = parser.finish()
        calls = [(call.name, parse_arguments(call.arguments)) for call in parsed.tool_calls]
        return (parsed.content or "").strip(), (parsed.reasoning or "").strip(), calls

    def _parser(self, markers: list[str], prompt: str) -> MarkupParser:
        in_reasoning = self.reasons and prompt.rstrip().endswith(THINK)
        return MarkupParser(self._tokenizer, self.stop_token_ids, markers, in_reasoning=in_reasoning)

    def _begins(self, text: str, ids: Sequence[int]) -> bool:
        """Whether `ids` begin with those of a text; the last few may depend on what follows it."""
        beginning = self._encode(text)[:-UNSETTLED]
        return list(ids[: len(beginning)]) == beginning

    def _extension(self, end: str, delta: str, previous_ids: Sequence[int]) -> Bridge:
        # Encoded behind the end token, which a tokenizer never merges with what follows.
        first, *delta_ids = self._encode(end + delta)
        return Bridge(delta_ids) if first == previous_ids[-1] else REWROTE

    def _text(self, messages: list[Json], tools: list[Json] | None, *, generation_prompt: bool = True) -> str:
        if tools and CALL not in self._template.source:
            raise RequestError(
                400,
                "this model's chat template has no tool calls that can be parsed; "
                "name a renderer that has in the model folder's renderer.json",
                code="tools_unsupported",
                param="tools",
            )
        return self._template.render(messages, tools, generation_prompt=generation_prompt)

    def _write_reply(self, messages: list[Json], tools: list[Json]) -> list[int]:
        return self._encode(self._text(messages, tools, generation_prompt=False))


def _behind_last(part: list[int], ids: Sequence[int]) -> list[int]:
    """What follows the last occurrence of `part`; nothing without one."""
    for start in range(len(ids) - len(part), -1, -1) if part else ():
        if ids[start] == part[0] and list(ids[start : start + len(part)]) == part:
            return list(ids[start + len(part) :])
    return []


def _no_reasoning(text: str) -> str:
    return re.sub(rf"{THINK}.*?{END_THINK}\s*", "", text, flags=re.DOTALL)


def _reasoning(sampled: str) -> str:
    """The reasoning at the start of an output (its opening marker may be in the prompt), "" for none."""
    before, marker, _ = sampled.partition(END_THINK)
    return before.rpartition(THINK)[2].strip() if marker else ""
