"""Renders any chat template. A bridge is used only after a proof that the template keeps the prefix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

from agentrl.domain.schemas import ForkReason, Json
from agentrl.errors import RequestError
from agentrl.rendering.encoding.memo import RenderedTexts
from agentrl.rendering.encoding.units import units_encode
from agentrl.rendering.messages import parse_arguments, role_of
from agentrl.rendering.options import CAPACITY, known_options, spelled, thinking_option
from agentrl.rendering.parsing.output_formats import HERMES
from agentrl.rendering.parsing.parser_choice import output_parser
from agentrl.rendering.renderer import Bridge, Opening, OutputParser
from agentrl.rendering.templates.format_probing import find_format
from agentrl.rendering.templates.model_folder import ModelFolder
from agentrl.rendering.templates.openings import Openings
from agentrl.rendering.templates.reasoning_loss import ReasoningLoss
from agentrl.rendering.templates.tokenizer_renderer import TokenizerRenderer

_TALK: list[Json] = [{"role": "user", "content": "x"}]

TAIL = 8  # tokens at a prompt's end; enough to hold the marker that opens its reasoning
UNSETTLED = 4  # tokens at the end of a text that more text may change

REWROTE = Bridge(None, ForkReason.TEMPLATE_REWROTE)


class TemplateRenderer(TokenizerRenderer):
    """Renders with the folder's template. Special tokens in messages are recognised.

    Outputs are parsed in the format that reads back what the template writes. Without such a format, tools are
    rejected.
    """

    name = "template"

    def __init__(self, folder: ModelFolder) -> None:
        """`folder` must have a chat template."""
        assert folder.template is not None
        self._template = folder.template
        tokenizer = folder.tokenizer()
        eos = tokenizer.token_to_id(folder.special_tokens.get("eos_token", ""))
        stop_token_ids = sorted({*folder.eos_token_ids, *([] if eos is None else [eos])})
        super().__init__(tokenizer, stop_token_ids, folder.vocab_size, folder.max_context)
        self._encode = units_encode(tokenizer)
        found = find_format(folder.template, tokenizer, self.stop_token_ids)
        self.reads_calls = found is not None
        self._reads = found or HERMES
        self.reasons = self._reads.think[1] in folder.template.source
        self._loss = ReasoningLoss(self._reads.think)
        self.thinking_option = thinking_option(folder.template.options)
        self._options: Json = {}
        self._with_options = lru_cache(CAPACITY)(self._make)
        self._texts = RenderedTexts()
        self._openings = Openings(self, self._write_reply, self._encode, self._reads, self._tokenizer)

    def with_options(self, options: Json) -> TemplateRenderer:
        """The template with further variables, which it must use."""
        known = known_options(options, self._template.options, self.name, reasons=self.reasons)
        return self._with_options(spelled(known)) if known else self

    def _make(self, options: str) -> TemplateRenderer:
        made = copy(self)
        made._options = json.loads(options)
        made._texts = RenderedTexts()
        made._openings = Openings(made, made._write_reply, made._encode, self._reads, self._tokenizer)
        made.__dict__.pop("_usual_generation_prompt", None)
        return made

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """Render and encode the prompt. Raises RequestError when the template rejects the conversation."""
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
        """The ids that the template adds after the reply, if it keeps everything before.

        Proof: the text of the whole conversation starts with the earlier prompt's text and, up to its first reply, with
        the same ids; the reply's turn equals the sampled one, parses to the same message, or equals the template's
        rendering of the reply as the last message, apart from empty reasoning; and no sampled reasoning was dropped.
        Requires `messages_before`.
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
        opened = self._encode(generation_prompt)
        output = _behind_last(opened, previous_ids)
        sampled, end = self.decode(output), self.decode(output[-1:])
        reasoning = self._reasoning(sampled)
        thoughtful = {self._reads.reasoning_key: reasoning} | reply if reasoning else reply
        try:
            whole = self._text([*history, thoughtful, *messages_after], tools)
        except RequestError:  # gpt-oss has no place for reasoning and content beside a call
            if thoughtful == reply:
                raise
            return REWROTE
        if thoughtful == reply:
            self._texts.put([*messages_before, *messages_after], tools, whole)
        if not output or not self._begins(whole.partition(generation_prompt)[0], previous_ids):
            return self._fork(whole, self._text([*history, thoughtful], tools, generation_prompt=False))

        turn, found, delta = whole.removeprefix(head).partition(end)
        stable = bool(found) and whole.startswith(head) and reasoning in turn
        if stable and (
            sampled == turn + end
            or self._message(opened, self._encode(turn), tools) == self._message(opened, output, tools)
        ):
            return self._extension(end, delta, previous_ids)
        alone = self._text([*history, thoughtful], tools, generation_prompt=False)
        last, ended, closing = alone.removeprefix(head).partition(end)
        kept = alone.startswith(head) and ended and self._loss.spoken(last) == self._loss.spoken(turn)
        if stable and kept and not closing.strip() and delta.startswith(closing):
            return self._extension(end, delta, previous_ids)
        return self._fork(whole, alone)

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """A parser for the template's format."""
        return self._parser(tools, prompt_ids)

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """The ids before a call's name, or before its arguments."""
        return self._openings.of(tools, name)

    def _generation_prompt_of(self, head: str, history: list[Json], tools: list[Json] | None) -> str:
        if self._usual_generation_prompt and head.endswith(self._usual_generation_prompt):
            return self._usual_generation_prompt
        return head.removeprefix(self._text(history, tools, generation_prompt=False))

    @cached_property
    def _usual_generation_prompt(self) -> str:
        try:
            return self._text(_TALK, None).removeprefix(self._text(_TALK, None, generation_prompt=False))
        except RequestError:  # the template does not accept this conversation
            return ""

    def _message(
        self, prompt_ids: Sequence[int], output: Sequence[int], tools: list[Json] | None
    ) -> tuple[str, str, list[tuple[str, Any]]]:
        """Parse an output to content, reasoning and calls, without white space at their ends."""
        parser = self._parser(tools, prompt_ids)
        parser.push(output)
        parsed = parser.finish()
        calls = [(call.name, parse_arguments(call.arguments)) for call in parsed.tool_calls]
        return (parsed.content or "").strip(), (parsed.reasoning or "").strip(), calls

    def _parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        opened = self.decode(prompt_ids[-TAIL:]).rstrip().endswith(self._reads.think[0].rstrip())
        return output_parser(
            self._reads,
            self._tokenizer,
            self.stop_token_ids,
            tools if self.reads_calls else None,
            prompt_ids,
            thinks=self.reasons,
            in_reasoning=self.reasons and opened,
        )

    def _fork(self, whole: str, alone: str) -> Bridge:
        """The reason why a conversation does not start with the earlier one."""
        lost = self.reasons and self._loss.between(alone, whole)
        return Bridge(None, ForkReason.REASONING_DROPPED) if lost else REWROTE

    def _reasoning(self, sampled: str) -> str:
        """The reasoning at the start of an output (its opening marker may be in the prompt), or ""."""
        start, end = self._reads.think
        before, marker, _ = sampled.partition(end)
        return before.rpartition(start)[2].strip() if marker else ""

    def _begins(self, text: str, ids: Sequence[int]) -> bool:
        """Whether `ids` start with those of a text; the last few may depend on the following text."""
        beginning = self._encode(text)[:-UNSETTLED]
        return list(ids[: len(beginning)]) == beginning

    def _extension(self, end: str, delta: str, previous_ids: Sequence[int]) -> Bridge:
        # The delta is encoded after the end token, which a tokenizer never merges with the next text.
        first, *delta_ids = self._encode(end + delta)
        return Bridge(delta_ids) if first == previous_ids[-1] else REWROTE

    def _text(self, messages: list[Json], tools: list[Json] | None, *, generation_prompt: bool = True) -> str:
        if tools and not self.reads_calls:
            raise RequestError(
                400,
                "this model's chat template has no tool calls that can be parsed; "
                "name a renderer that has in the model folder's renderer.json",
                code="tools_unsupported",
                param="tools",
            )
        return self._template.render(messages, tools, generation_prompt=generation_prompt, options=self._options)

    def _write_reply(self, messages: list[Json], tools: list[Json]) -> list[int]:
        return self._encode(self._text(messages, tools, generation_prompt=False))


def _behind_last(part: list[int], ids: Sequence[int]) -> list[int]:
    """The ids after the last occurrence of `part`; empty without one."""
    for start in range(len(ids) - len(part), -1, -1) if part else ():
        if ids[start] == part[0] and list(ids[start : start + len(part)]) == part:
            return list(ids[start + len(part) :])
    return []
