"""Token ids that grow turn by turn. The cost of a turn depends on the ids that it adds, not on those before.

    TokenIds ◄── before ── part ◄── before ── part     each: its ids packed, their JSON text, the digest up to its end

A conversation's whole prompt is sent to the engine with every call. At 30,000 tokens, joining lists of ints and writing
them as JSON would be most of the cost of a call. Here only the JSON texts of the parts are joined.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, overload

import numpy as np
import orjson

from agentrl.domain.schemas import Float32, Int32

ID_BYTES = 4


def little_endian(code: Literal["i", "f"], values: Sequence[int] | Sequence[float] | Int32 | Float32) -> bytes:
    """Pack numbers, 4 bytes each. `array` reads a list three times faster than numpy does."""
    if isinstance(values, np.ndarray):
        return values.astype(f"<{code}4", copy=False).tobytes()
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return little_endian("i", ids)


def unpacked(raw: bytes) -> list[int]:
    """Inverse of `packed`."""
    ids = array("i")
    ids.frombytes(raw)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class TokenIds(Sequence[int]):
    """An immutable sequence that shares its beginning with the sequence it extends. `TokenIds()` is empty."""

    __slots__ = ("_before", "_hash", "_length", "_packed", "_text")

    def __init__(self, ids: Sequence[int] = (), before: TokenIds | None = None) -> None:
        self._before = before
        self._packed = packed(ids)
        self._text: bytes | None = None
        self._length = len(ids) + (len(before) if before is not None else 0)
        self._hash: hashlib.blake2b = before._hash.copy() if before is not None else hashlib.blake2b(digest_size=16)
        self._hash.update(self._packed)

    def extended(self, ids: Sequence[int]) -> TokenIds:
        """This sequence followed by `ids`."""
        if not ids:
            return self
        return TokenIds(ids, self if self._length else None)

    @property
    def digest(self) -> str:
        """BLAKE2b of all packed ids, 32 hex digits."""
        return self._hash.hexdigest()

    def json(self) -> bytes:
        """The ids as a JSON array."""
        return b"[%b]" % b",".join(part._own_text() for part in self._parts())

    def behind(self, start: int) -> bytes:
        """The ids from index `start` on, packed."""
        raws: list[bytes] = []
        part: TokenIds | None = self
        while part is not None and part._length > start:
            first = part._length - len(part._packed) // ID_BYTES
            raws.append(part._packed[max(0, start - first) * ID_BYTES :])
            part = part._before
        return raws[0] if len(raws) == 1 else b"".join(reversed(raws))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(unpacked(self.behind(0)))

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        """A slice is a list. The cost of a slice at the end depends on its own length only."""
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            if step != 1:
                return list(self)[at]
            return unpacked(self.behind(start)[: max(0, stop - start) * ID_BYTES])
        if not -self._length <= at < self._length:
            raise IndexError(f"index {at} in {self._length} token ids")
        at %= self._length
        return unpacked(self.behind(at)[:ID_BYTES])[0]

    def __repr__(self) -> str:
        return f"TokenIds({list(self)})"

    def _parts(self) -> list[TokenIds]:
        parts: list[TokenIds] = []
        part: TokenIds | None = self
        while part is not None:
            parts.append(part)
            part = part._before
        parts.reverse()
        return parts

    def _own_text(self) -> bytes:
        if self._text is None:
            self._text = orjson.dumps(unpacked(self._packed))[1:-1]
        return self._text
