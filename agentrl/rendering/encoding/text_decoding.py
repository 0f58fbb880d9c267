"""Ids → text, a few ids at a time, without ever cutting a character in half."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer

from agentrl.rendering.encoding.bytelevel import TokenBytes, token_bytes
from agentrl.rendering.renderer import ContentDelta, Delta, OutputParser, places

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes an incomplete or invalid byte sequence to."""


class TextDecoder(ABC):
    """Incremental decoding: the pieces add up to the text of all ids."""

    @abstractmethod
    def push_run(self, ids: Sequence[int]) -> str:
        """The text that more ids complete. What may be the first bytes of a character waits for the next ones."""

    @abstractmethod
    def flush(self) -> str:
        """The text that still waits: there will be no more, or something else than text follows."""

    def push(self, token: int) -> str:
        """The text that one more id completes."""
        return self.push_run((token,))


def text_decoder(tokenizer: Tokenizer) -> TextDecoder:
    """A decoder for one text of a tokenizer."""
    table = token_bytes(tokenizer)
    return ContextDecoder(tokenizer) if table is None else ByteDecoder(table)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids`, special tokens included."""
    table = token_bytes(tokenizer)
    if table is None:
        return tokenizer.decode(list(ids), skip_special_tokens=False)
    return table.of(ids).decode(errors="replace")


def reasoning_tokens(ids: Sequence[int], reasoning: str | None, decode: Callable[[Sequence[int]], str]) -> int:
    """How many of an output's `ids` are reasoning: all up to where its text ends, the marker before it included.

    0 without `reasoning`, and where the output does not spell it in one piece. `decode` is the renderer's.
    """
    if not reasoning or reasoning not in decode(ids):
        return 0
    return bisect_left(range(len(ids)), True, key=lambda count: reasoning in decode(ids[:count]))


class ByteDecoder(TextDecoder):
    """For byte-level vocabularies: the bytes of the ids, read as UTF-8."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push_run(self, ids: Sequence[int]) -> str:
        """The text of the bytes so far, without an incomplete character at their end."""
        return self._utf8.decode(self._table.of(ids))

    def flush(self) -> str:
        """U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", True)


class ContextDecoder(TextDecoder):
    """For tokenizers whose ids read otherwise at the beginning: the ids of the last piece are kept as context.

    Ids whose text ends with U+FFFD may be the first bytes of a character, so they wait. So do ids without text: a
    context of those would be none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push_run(self, ids: Sequence[int]) -> str:
        """The text of the ids, one after the other."""
        return "".join([self._next(token) for token in ids])

    def flush(self) -> str:
        """The text of the ids that wait, as it is."""
        text = self._pending_text() if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _next(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class TextParser(OutputParser):
    """Plain text: no markup is read, special tokens are left out."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: list[int]) -> None:
        super().__init__(stop_token_ids)
        self._decoder = text_decoder(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        start = 0
        for at in places(ids, self._special):
            yield ContentDelta(self._decoder.push_run(ids[start:at]) + self._decoder.flush())
            start = at + 1
        yield ContentDelta(self._decoder.push_run(ids[start:]))

    def _end(self) -> Iterator[Delta]:
        yield ContentDelta(self._decoder.flush())
