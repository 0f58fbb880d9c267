"""Decodes ids to text incrementally, without splitting characters."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer

from agentrl.rendering.encoding.bytelevel import TokenBytes, token_bytes
from agentrl.rendering.renderer import ContentDelta, Delta, OutputParser, places

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The text to which a tokenizer decodes an incomplete or invalid byte sequence."""


class TextDecoder(ABC):
    """Incremental decoding. The parts concatenate to the text of all ids."""

    @abstractmethod
    def push_run(self, ids: Sequence[int]) -> str:
        """The text completed by more ids. An incomplete character is held back."""

    @abstractmethod
    def flush(self) -> str:
        """The text that was held back, at the end."""

    def push(self, token: int) -> str:
        """The text completed by one more id."""
        return self.push_run((token,))


def text_decoder(tokenizer: Tokenizer) -> TextDecoder:
    """A decoder for one text."""
    table = token_bytes(tokenizer)
    return ContextDecoder(tokenizer) if table is None else ByteDecoder(table)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids, special tokens included."""
    table = token_bytes(tokenizer)
    if table is None:
        return tokenizer.decode(list(ids), skip_special_tokens=False)
    return table.of(ids).decode(errors="replace")


def reasoning_tokens(ids: Sequence[int], reasoning: str | None, decode: Callable[[Sequence[int]], str]) -> int:
    """The number of reasoning tokens in an output, up to the end of the reasoning, its marker included.

    0 without `reasoning`, and when the output does not contain it contiguously. `decode` is the renderer's.
    """
    if not reasoning or reasoning not in decode(ids):
        return 0
    return bisect_left(range(len(ids)), True, key=lambda count: reasoning in decode(ids[:count]))


class ByteDecoder(TextDecoder):
    """For byte-level vocabularies: decodes bytes as UTF-8."""

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
    """For tokenizers whose ids decode differently at the start: keeps the last ids as context.

    Ids whose text ends with U+FFFD may be an incomplete character and are held back, as are ids without text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push_run(self, ids: Sequence[int]) -> str:
        """The text of the ids, one after the other."""
        return "".join([self._next(token) for token in ids])

    def flush(self) -> str:
        """The text of the ids that were held back, incomplete characters included."""
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
