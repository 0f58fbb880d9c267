"""Reads the text between the markers of a tool call, with one reader per call syntax.

A reader accepts exactly what the model wrote, without repairs or guesses.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.rendering.messages import parse_arguments
from agentrl.rendering.parsing.alphabet import Alphabet
from agentrl.rendering.parsing.typed_values import Parameters, read_json, write_json

_NAME = re.compile(r"[^\s<>\"'{}()\[\]|,;\ud800-\udfff]{1,256}")
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A call, with its `id` where the format has one."""

    name: str
    arguments: str  # JSON
    id: str | None = None


Items = list[Found | str]
"""Calls, and text between or after them."""


class CallReader(ABC):
    """Reads the text between a call's markers. In this text each marker token is one letter of an `Alphabet`."""

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet

    @abstractmethod
    def read(self, body: str, parameters: Parameters) -> Items | None:
        """The calls of a complete body; None when it is not in the format."""

    @abstractmethod
    def goes_on(self, body: str) -> bool:
        """Whether a closing marker after `body` is inside a value and does not close the call."""

    def _pattern(self, pattern: str) -> re.Pattern[str]:
        """Compile a regular expression in which `«marker»` stands for a marker."""
        return re.compile(re.sub("«(.*?)»", lambda found: self._quoted(found[1]), pattern), re.DOTALL)

    def _quoted(self, marker: str) -> str:
        return re.escape(self._alphabet.marked(marker))

    def _object(self, text: str) -> str | None:
        """Normalize JSON arguments for clients; None when `text` is not a JSON object."""
        try:
            value = read_json(self._alphabet.spelled(text))
        except ValueError:
            return None
        return write_json(value) if isinstance(value, dict) else None


Reader = Callable[[Alphabet], CallReader]


class HermesReader(CallReader):
    """`{"name": "f", "arguments": {…}}`."""

    def read(self, body: str, parameters: Parameters) -> Items | None:
        try:
            value = read_json(self._alphabet.spelled(body))
        except ValueError:
            return None
        found = call_of(value, ("arguments",))
        return None if found is None else [found]

    def goes_on(self, body: str) -> bool:
        return in_string(body)


class KimiReader(CallReader):
    """`functions.f:0`, a marker, JSON. The id is part of the text."""

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__(alphabet)
        self._head = self._pattern(
            r"\s*((?:functions\.)?((?!functions\.)[^\s:]+)(?::\d+)?)\s*«<|tool_call_argument_begin|>»"
        )

    def read(self, body: str, parameters: Parameters) -> Items | None:
        head = self._head.match(body)
        if head is None or not is_name(head[2]):
            return None
        arguments = self._object(body[head.end() :])
        return None if arguments is None else [Found(head[2], arguments, head[1])]

    def goes_on(self, body: str) -> bool:
        head = self._head.match(body)
        return head is not None and in_string(body[head.end() :])


class DeepSeekReader(CallReader):
    """V3 and R1: `function`, a marker, name, JSON in a fence. V3.1: name, the marker, JSON."""

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__(alphabet)
        self._fenced = self._pattern(r"\s*function«<｜tool▁sep｜>»([^\n]+)\n```(?:json)?\n")
        self._plain = self._pattern(r"\s*(\S[^\n]*?)«<｜tool▁sep｜>»")

    def read(self, body: str, parameters: Parameters) -> Items | None:
        if head := self._fenced.match(body):
            text, fence, rest = body[head.end() :].rpartition("\n```")
            whole = fence and not rest.strip()
        else:
            head = self._plain.match(body)
            text, whole = body[head.end() :] if head else "", True
        if head is None or not whole or not is_name(head[1].strip()):
            return None
        arguments = self._object(text)
        return None if arguments is None else [Found(head[1].strip(), arguments)]

    def goes_on(self, body: str) -> bool:
        head = self._fenced.match(body) or self._plain.match(body)
        return head is not None and in_string(body[head.end() :])


class XmlReader(CallReader):
    """`<function=f>`, then `<parameter=k>` with the value on lines of its own."""

    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
    _END = re.compile(r"</function>\s*")

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__(alphabet)
        behind = r"<parameter=|</function>\s*(?:<function=|«<tool_call>»|\Z)"  # a call may lack its end
        self._parameter = self._pattern(rf"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?={behind})")

    def read(self, body: str, parameters: Parameters) -> Items | None:
        calls: Items = []
        at = 0
        while not calls or at < len(body):
            head = self._FUNCTION.match(body, at)
            if head is None or not is_name(head[1].strip()):
                return None
            name, at = head[1].strip(), head.end()
            arguments: dict[str, Any] = {}
            while found := self._parameter.match(body, at):
                key, at = found[1].strip(), found.end()
                if key in arguments:
                    return None
                arguments[key] = parameters.value(name, key, self._alphabet.spelled(found[2]))
            end = self._END.match(body, at)
            if end is None:
                return None
            at = end.end()
            calls.append(Found(name, write_json(arguments)))
        return calls

    def goes_on(self, body: str) -> bool:
        return body.rfind("<parameter=") > body.rfind("</parameter>")


class MarkedReader(CallReader):
    """A name and arguments, each between an opening and a closing marker."""

    def __init__(self, alphabet: Alphabet, head: str, argument: str, opening: str, closing: str) -> None:
        """Patterns: `head` captures the call's name, `argument` an argument's key and then its value."""
        super().__init__(alphabet)
        self._head, self._argument = self._pattern(head), self._pattern(argument)
        self._opening, self._closing = alphabet.marked(opening), alphabet.marked(closing)

    def read(self, body: str, parameters: Parameters) -> Items | None:
        head = self._head.match(body)
        name = self._plain(head[1]) if head else ""
        if head is None or not is_name(name):
            return None
        arguments: dict[str, Any] = {}
        at = head.end()
        while found := self._argument.match(body, at):
            key, at = self._plain(self._alphabet.spelled(found[1])), found.end()
            if key in arguments:
                return None
            try:
                arguments[key] = self._value(name, key, found, parameters)
            except ValueError:
                return None
        return [Found(name, write_json(arguments))] if at == len(body) else None

    def goes_on(self, body: str) -> bool:
        return body.rfind(self._opening) > body.rfind(self._closing)

    def _plain(self, text: str) -> str:
        """A name or a key without the characters that the format adds."""
        return text

    def _value(self, name: str, key: str, found: re.Match[str], parameters: Parameters) -> Any:
        """The value of one argument. Raises ValueError where its text is not valid."""
        return parameters.value(name, key, self._alphabet.spelled(found[2]))


class PairsReader(MarkedReader):
    """A name, then `<arg_key>k</arg_key><arg_value>v</arg_value>`. Tokens may have a `suffix`."""

    def __init__(self, alphabet: Alphabet, suffix: str = "") -> None:
        key, value = f"arg_key{suffix}", f"arg_value{suffix}"
        super().__init__(
            alphabet,
            rf"\s*([^\s\ud800-\udbff<]+)\s*(?:«<tool_sep{suffix}>»)?\s*",
            rf"(?>«<{key}>»(.*?)«</{key}>»\s*«<{value}>»)(.*?)«</{value}>»\s*(?=«<{key}>»|«<tool_call{suffix}>»|\Z)",
            f"<{value}>",
            f"</{value}>",
        )

    def _plain(self, text: str) -> str:
        return text.strip()


class InvokeReader(MarkedReader):
    """The text after `<invoke name="`: the name, then `<parameter name="k">v</parameter>`."""

    tag = ""
    _typed = ""

    def __init__(self, alphabet: Alphabet) -> None:
        tag = self.tag
        start = f'«<{tag}parameter name="»'
        super().__init__(
            alphabet,
            r'([^"\n]+)">\s*',
            rf'{start}([^"\n]+)"{self._typed}>(.*?)«</{tag}parameter>»\s*(?={start}|«<{tag}invoke name="»|\Z)',
            f"<{tag}parameter name=",
            f"</{tag}parameter>",
        )


class DsmlReader(InvokeReader):
    """DeepSeek V3.2 and V4: each parameter says whether it is a string, or one JSON object holds all arguments."""

    tag = "｜DSML｜"
    _typed = r' string="(true|false)"'

    def read(self, body: str, parameters: Parameters) -> Items | None:
        found = super().read(body, parameters)
        head = self._head.match(body)
        if found is None and head is not None and is_name(head[1]):
            arguments = self._object(body[head.end() :])
            return None if arguments is None else [Found(head[1], arguments)]
        return found

    def _value(self, name: str, key: str, found: re.Match[str], parameters: Parameters) -> Any:
        text = self._alphabet.spelled(found[3])
        return text if found[2] == "true" else read_json(text)


class KimiK3Reader(MarkedReader):
    """`tool="f" index="1"<|sep|>`, then arguments that name their types."""

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__(
            alphabet,
            r'\s+tool="([^"\n]+)"(?:\s+index="\d+")?\s*«<|sep|>»\s*',
            r'«<|open|>»argument\s+key="([^"\n]*)"(?:\s+type="(\w+)")?\s*«<|sep|>»(.*?)«<|close|>»argument«<|sep|>»\s*',
            "<|open|>argument",
            "<|close|>argument<|sep|>",
        )

    def _plain(self, text: str) -> str:
        return text.replace("&quot;", '"').replace("&amp;", "&")

    def _value(self, name: str, key: str, found: re.Match[str], parameters: Parameters) -> Any:
        text = self._alphabet.spelled(found[3])
        return text if (found[2] or "string") == "string" else read_json(text)


def is_name(text: str) -> bool:
    """Whether a text is a valid tool name."""
    return _NAME.fullmatch(text) is not None


def call_of(value: Any, keys: tuple[str, ...]) -> Found | None:
    """Read a call from a JSON object; its arguments are under the first key of `keys` that exists."""
    match value:
        case {"name": str(name), **rest} if is_name(name):
            arguments = parse_arguments(next((rest[key] for key in keys if key in rest), None))
            id = rest.get("id")
            if isinstance(arguments, dict):
                return Found(name, write_json(arguments), id if isinstance(id, str) and id else None)
    return None


def in_string(text: str) -> bool:
    """Whether a JSON text ends inside a string."""
    closed = True
    for found in _QUOTED.finditer(text):
        closed = bool(found[1])
        if not closed:
            return "\n" not in found[0]
    return False
