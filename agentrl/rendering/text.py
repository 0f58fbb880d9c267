"""Ids → text, one id at a time, without ever cutting a character in half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from agentrl.rendering.base import ContentDelta, Delta, OutputParser

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes an incomplete or invalid byte sequence to."""


class TextDecoder:
    """Incremental decoding: the pieces add up to the text of all ids.

    Ids whose text ends with U+FFFD may be the first bytes of a character, so they wait for the next one; `flush`
    gives them up as they are. The ids of the last piece are kept as context for decoders that look one id back, as
    those do not that turn every id into its bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._looks_back = not isinstance(tokenizer.decoder, ByteLevel)
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending if self._looks_back else [], []
        return text

    def push_run(self, ids: Sequence[int]) -> str:
        """The text that several ids complete: what pushing one after the other gives, at once where it can be."""
        if not self._looks_back and ids:
            text = self._decode([*self._pending, *ids])
            if not text.endswith(REPLACEMENT):
                self._pending = []
                return text
        return "".join([self.push(token) for token in ids])

    def flush(self) -> str:
        """The text of the ids that still wait: there will be no more, or something else than text follows."""
        text = self._pending_text() if self._pending else ""
        self._context, self._pending = [], []
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
        self._decoder = TextDecoder(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)

    def _run(self, ids: Sequence[int]) -> Iterator[Delta]:
        start = 0
        for at in [i for i, token in enumerate(ids) if token in self._special]:
            yield ContentDelta(self._decoder.push_run(ids[start:at]) + self._decoder.flush())
            start = at + 1
        yield ContentDelta(self._decoder.push_run(ids[start:]))

    def _end(self) -> Iterator[Delta]:
        yield ContentDelta(self._decoder.flush())
