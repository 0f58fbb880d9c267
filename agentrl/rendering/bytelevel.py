"""Byte-level vocabularies: every id stands for some bytes, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

TOKENIZERS = 8
"""Tables kept: a process serves one model, or few."""


def _byte_letters() -> dict[str, int]:
    """How vocabularies spell bytes: printable characters of Latin-1 as themselves, others as letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


class TokenBytes(dict[int, bytes]):
    """id → bytes, filled as ids are met. An id without a token stands for no bytes, as it does for `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        try:
            found = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token, which may hold any character
            found = token.encode()
        self[id] = found
        return found

    def of(self, ids: Iterable[int]) -> bytes:
        """The bytes of several ids, one after the other."""
        return b"".join(map(self.__getitem__, ids))


@lru_cache(TOKENIZERS)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The table of a tokenizer, one for all who ask; None where ids are not decoded to bytes, each by itself."""
    return TokenBytes(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None
