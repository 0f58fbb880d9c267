"""Byte-level vocabularies, in which each id stands for a fixed byte sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

TOKENIZERS = 8
"""Number of cached tables: a process serves only a few models."""


def _byte_letters() -> dict[str, int]:
    """Character → byte, as in byte-level vocabularies: printable Latin-1 as itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


class TokenBytes:
    """id → bytes, as a list: frequent tokens have low ids, so they lie together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bytes = [_bytes_of(tokenizer.id_to_token(id)) for id in range(size)]
        self.longest = max(map(len, self._bytes), default=0)

    def of(self, ids: Sequence[int]) -> bytes:
        """The concatenated bytes of several ids. Ids without a token have no bytes, as in `tokenizers`."""
        try:
            return b"".join(map(self._bytes.__getitem__, ids))
        except IndexError:
            return b"".join([self._bytes[id] for id in ids if id < len(self._bytes)])

    def lengths(self, ids: Iterable[int]) -> Iterator[int]:
        """The number of bytes of each id. Every id must have a token."""
        return map(len, map(self._bytes.__getitem__, ids))


def _bytes_of(token: str | None) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token or ""))
    except KeyError:  # an added token, which may hold any character
        return (token or "").encode()


@lru_cache(TOKENIZERS)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The cached table of a tokenizer; None if the tokenizer's decoder is not byte-level."""
    return TokenBytes(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None
