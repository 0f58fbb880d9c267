"""Finds the opening of a tool call, for `tool_choice`: the ids with which every call, or every call of one tool,
starts.

A renderer writes replies with different tool names and arguments; their common prefix is the opening. The rest of the
call is constrained by a grammar (`structural_tags.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile

from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, did_you_mean
from agentrl.rendering.messages import function_of
from agentrl.rendering.parsing.output_formats import END_THINK, KIMI, THINK
from agentrl.rendering.parsing.parser_choice import Reads, alphabet_of
from agentrl.rendering.renderer import Opening, Renderer
from agentrl.rendering.templates.structural_tags import ANY_ID, NoTag, marked_text, structural_tag

WriteReply = Callable[[list[Json], list[Json]], list[int]]
"""(messages that end with a reply, tools) → ids, without a generation prompt."""

Encode = Callable[[str], list[int]]
"""Text → ids. Special tokens are recognised, and no prefix is added."""

_QUESTION: Json = {"role": "user", "content": "x"}
_NAMES = ("a", "Z", "_")  # the first letters differ, so that the opening contains none of them
_ARGUMENTS: tuple[Json, ...] = ({"a": 1}, {"Z": 2}, {"_": 3}, {})
_THOUGHT = "§"
CAPACITY = 1024  # openings


def chosen_names(tools: Sequence[Json], name: str | None) -> list[str]:
    """The tools that a call may name. Raises RequestError for an unknown name or without tools."""
    names: list[str] = [function_of(tool)["name"] for tool in tools]
    if not names:
        raise RequestError(400, "tool_choice: needs tools", code="invalid_tool_choice", param="tool_choice")
    if name is not None and name not in names:
        raise RequestError(
            400,
            f"tool_choice: no tool is called {name!r}{did_you_mean(name, names)}",
            code="invalid_tool_choice",
            param="tool_choice",
        )
    return names if name is None else [name]


class Openings:
    """The openings of a renderer's calls, cached by tool names."""

    def __init__(
        self, renderer: Renderer, write_reply: WriteReply, encode: Encode, reads: Reads, tokenizer: Tokenizer
    ) -> None:
        self._renderer = renderer
        self._write_reply = write_reply
        self._encode = encode
        self._reads = reads
        self._alphabet = alphabet_of(reads, tokenizer)
        self._shared = lru_cache(CAPACITY)(self._beginning)
        self._marked = lru_cache(CAPACITY)(self._rest)
        self._known = lru_cache(CAPACITY)(self._derive)

    def of(self, tools: list[Json], name: str | None) -> Opening:
        """The opening for a choice, with a grammar for the rest of the call.

        Without a grammar, the opening is the part of a call that the format determines. Raises RequestError(400) when
        it cannot be parsed.
        """
        choices = chosen_names(tools, name)
        names = tuple(function_of(tool)["name"] for tool in tools)
        chosen = {function_of(tool)["name"]: tool for tool in tools if function_of(tool)["name"] in choices}
        shared = self._shared(names, tuple(choices))
        try:
            tag = structural_tag(
                list(chosen.values()),
                lambda called: lambda arguments: self._marked(names, shared, called, json.dumps(arguments)),
                self._reads,
                self._alphabet,
                self._renderer.stop_token_ids,
            )
        except NoTag:
            needy = len(choices) == 1 and _needs_arguments(chosen[choices[0]])
            return self._known(names, tuple(choices), needy)
        return Opening(list(shared), {"structural_tag": tag})

    def _beginning(self, tool_names: tuple[str, ...], choices: tuple[str, ...]) -> tuple[int, ...]:
        """The common prefix of calls with all names."""
        written = self._writer(tool_names)
        return _common([written(each, _ARGUMENTS[0], index) for index, each in enumerate([*choices, *_NAMES])])

    def _rest(self, tool_names: tuple[str, ...], shared: tuple[int, ...], name: str, arguments: str) -> str:
        """The rest of a call after the common prefix, marked. Raises NoTag for a different prefix."""
        ids = self._writer(tool_names)(name, json.loads(arguments), ANY_ID)
        if tuple(ids[: len(shared)]) != shared:
            raise NoTag("calls begin otherwise with other arguments")
        stops = set(self._renderer.stop_token_ids)
        return marked_text(ids[len(shared) :], self._alphabet, self._renderer.decode, stops)

    def _writer(
        self, tool_names: tuple[str, ...], choices: tuple[str, ...] = ()
    ) -> Callable[[str, Json, int], list[int]]:
        """A function that writes calls after a prompt; calls of `choices` must parse to themselves."""
        renderer, tools = self._renderer, [_bare_tool(name) for name in tool_names]
        prompt = renderer.render([_QUESTION], tools)

        def written(name: str, arguments: Json, index: int) -> list[int]:
            reply = _reply(name, arguments, index, self._reads)
            ids = behind_prompt(renderer, self._write_reply, self._encode, prompt, reply, tools)
            if ids is None or (name in choices and not _reads_back(renderer, prompt, ids, tools, name, arguments)):
                raise refusal(renderer.name)
            return ids

        return written

    def _derive(self, tool_names: tuple[str, ...], choices: tuple[str, ...], needs_arguments: bool) -> Opening:
        renderer, tools = self._renderer, [_bare_tool(name) for name in tool_names]
        prompt = renderer.render([_QUESTION], tools)
        written = self._writer(tool_names, choices)
        if len(choices) == 1:
            given = _ARGUMENTS[:-1] if needs_arguments else _ARGUMENTS
            spelled = [written(choices[0], arguments, index) for index, arguments in enumerate(given)]
        else:
            spelled = [written(each, _ARGUMENTS[0], index) for index, each in enumerate([*choices, *_NAMES])]
        opening = list(_common(spelled))
        named = len(choices) > 1 or choices[0] in renderer.decode(opening)
        if not named or not _opens_a_call(renderer, prompt, opening, self._encode, tools):
            raise refusal(renderer.name)
        return Opening(opening)


def _common(spelled: list[list[int]]) -> tuple[int, ...]:
    return tuple(ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*spelled, strict=False)))


def refusal(renderer_name: str) -> RequestError:
    """The error of a renderer without openings."""
    return RequestError(
        400,
        f"tool_choice: the chat format {renderer_name!r} cannot begin a tool call for the model; use 'auto' or 'none'",
        code="unsupported_parameter",
        param="tool_choice",
    )


def _bare_tool(name: str) -> Json:
    parameters: Json = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _needs_arguments(tool: Json) -> bool:
    return bool((function_of(tool).get("parameters") or {}).get("required"))


def _reply(name: str, arguments: Json, index: int, reads: Reads) -> Json:
    call = {
        "id": f"functions.{name}:{index}" if reads is KIMI else f"call{index:05}",  # some formats write the id
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def behind_prompt(
    renderer: Renderer, write_reply: WriteReply, encode: Encode, prompt: list[int], reply: Json, tools: list[Json]
) -> list[int] | None:
    """The ids that a reply adds to the prompt; None if it does not start with the prompt."""
    whole = write_reply([_QUESTION, reply], tools)
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    head = renderer.decode(prompt)
    text = renderer.decode(whole)
    if text.startswith(head):
        return encode(text.removeprefix(head))
    # The prompt opens reasoning, and the format leaves out empty reasoning: close it after a thought.
    thoughtful = renderer.decode(write_reply([_QUESTION, reply | {"reasoning_content": _THOUGHT}], tools))
    thought, found, rest = thoughtful.removeprefix(head).partition(_THOUGHT)
    if thoughtful.startswith(head) and found and not thought.strip():
        return encode(rest)
    # The format leaves out all reasoning: close it without a thought, as models do.
    before, found, rest = head.rpartition(THINK)
    if found and not rest.strip() and text.startswith(before):
        return encode(f"\n{END_THINK}\n\n{text.removeprefix(before)}")
    return None


def _reads_back(
    renderer: Renderer, prompt: list[int], ids: list[int], tools: list[Json], name: str, arguments: Json
) -> bool:
    parser = renderer.parser(tools, prompt)
    parser.push(ids)
    match parser.finish().tool_calls:
        case [call]:
            return call.name == name and bool(json.loads(call.arguments)) == bool(arguments)
    return False


def _opens_a_call(renderer: Renderer, prompt: list[int], opening: list[int], encode: Encode, tools: list[Json]) -> bool:
    """Whether text after the opening is neither content nor reasoning."""
    parser = renderer.parser(tools, prompt)
    parser.push(opening + encode("x"))
    parsed = parser.finish()
    return not parsed.reasoning and (parsed.content or "").strip() != "x"
