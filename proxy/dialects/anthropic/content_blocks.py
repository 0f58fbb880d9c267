"""Converts the messages of Anthropic's API, made of content blocks, to messages in the shape of Chat Completions.

An answer of the policy is one message, even if an agent sends it back as several: consecutive assistant messages are
joined. Each tool result becomes a message, in the order of the blocks; consecutive text blocks become one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from agentrl.domain.schemas import UNREAD, Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.anthropic.message_tools import Toolbox
from agentrl.proxy.dialects.anthropic.message_types import (
    AssistantMessage,
    Document,
    Image,
    Message,
    PlainText,
    RedactedThinking,
    SearchResult,
    SystemMessage,
    Text,
    Texts,
    Thinking,
    ToolAddition,
    ToolReference,
    ToolRemoval,
    ToolResult,
    ToolUse,
    UserMessage,
)
from agentrl.proxy.dialects.tool_results import Results


def chat_messages(system: str | list[Text] | None, messages: Sequence[Message], tools: Toolbox) -> list[Json]:
    """The conversation in the shape of Chat Completions. Tools that it loads are added to `tools.loaded`.

    Raises RequestError 400 that names the place of an invalid value.
    """
    found: list[Json] = []
    if instructions := text_of(system):
        found.append({"role": "system", "content": instructions})
    last_user = max((i for i, message in enumerate(messages) if isinstance(message, UserMessage)), default=-1)
    for i, message in enumerate(messages):
        at = f"messages[{i}].content"
        match message:
            case UserMessage(content=content):
                found += _of_user(content, tools, at)
            case AssistantMessage(content=content):
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                _add(found[-1], content, at)
            case SystemMessage(clear_at="next_user_message") if i < last_user:
                pass
            case SystemMessage(content=content):
                if (text := _of_system(content, tools, at)) or isinstance(content, str):
                    found.append({"role": "system", "content": text})
    _check_results(messages)
    return found


def _check_results(messages: Sequence[Message]) -> None:
    """Raise RequestError 400 for a tool result without a call."""
    results = Results()
    for i, message in enumerate(messages):
        for j, block in enumerate(() if isinstance(message.content, str) else message.content or ()):
            if isinstance(block, ToolUse):
                results.call(block.id)
            elif isinstance(block, ToolResult):
                results.result(block.tool_use_id, f"messages[{i}].content[{j}].tool_use_id")
    results.check()


def text_of(content: str | Sequence[Text] | None) -> str:
    """The text of text blocks, joined without a separator."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or [])


def _of_user(
    content: str | Sequence[Text | Document | SearchResult | ToolResult], tools: Toolbox, at: str
) -> Iterator[Json]:
    """The messages of a user turn: one for each tool result, and one for the texts between them."""
    if isinstance(content, str):
        content = [Text(text=content)]
    texts: list[str] = []
    for i, block in enumerate(content):
        if isinstance(block, ToolResult):
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            result = _of_result(block.content, tools, f"{at}[{i}].content")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        elif (text := _read(block)) is not None:
            texts.append(text)
        else:
            place = f"{at}[{i}].source"
            raise RequestError(400, f"{place}: only text is supported", code="invalid_messages", param=place)
    if texts or not content:
        yield {"role": "user", "content": "".join(texts)}


def _of_result(
    content: str | Sequence[Text | Image | Document | SearchResult | ToolReference] | None, tools: Toolbox, at: str
) -> str:
    """A tool's result; a fixed text replaces each part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, block in enumerate(content):
        if isinstance(block, ToolReference):
            texts.append(tools.load_named(block.tool_name, f"{at}[{i}].tool_name"))
        else:
            texts.append(UNREAD if (text := _read(block)) is None else text)
    return "".join(texts)


def _read(block: Text | Image | Document | SearchResult) -> str | None:
    """A block's text; None for a block without text."""
    match block:
        case Text(text=text):
            return text
        case SearchResult(title=title, source=source, content=content):
            return "\n".join((title, source, text_of(content)))
        case Document(source=PlainText(data=text), title=title, context=context):
            return "\n".join(part for part in (title, context, text) if part)
        case Document(source=Texts(content=content), title=title, context=context):
            return "\n".join(part for part in (title, context, text_of(content)) if part)
    return None


def _of_system(content: str | Sequence[Text | ToolAddition | ToolRemoval] | None, tools: Toolbox, at: str) -> str:
    """The text of a system message inside the conversation, with the tools that it adds and removes."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, block in enumerate(content):
        match block:
            case Text(text=text):
                texts.append(text)
            case ToolAddition(tool=tool):
                texts.append(tools.load(tool, f"{at}[{i}].tool"))
            case ToolRemoval(tool=tool):
                texts.append(f"The tool {tool.name} is no longer available.\n")
    return "".join(texts)


def _add(turn: Json, content: str | Sequence[Text | Thinking | RedactedThinking | ToolUse], at: str) -> None:
    """Add blocks to their assistant message `turn`."""
    if isinstance(content, str):
        content = [Text(text=content)]
    for i, block in enumerate(content):
        match block:
            case Text(text=text):
                turn["content"] = (turn["content"] or "") + text
            case Thinking(thinking=thinking):
                if thinking:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
            case ToolUse(id=call_id, name=name, input=value):
                function = {"name": name, "arguments": _arguments(value, f"{at}[{i}].input")}
                turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _arguments(value: msgspec.Raw, at: str) -> str:
    written = bytes(value)
    if not written.startswith(b"{"):
        raise RequestError(400, f"{at}: must be an object", code="invalid_messages", param=at)
    try:
        return written.decode()
    except UnicodeDecodeError as error:
        raise RequestError(400, f"{at}: is not valid UTF-8: {error}", code="invalid_json", param=at) from error
