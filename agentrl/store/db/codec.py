"""Packs numbers and JSON as bytes (little-endian arrays, zstd); makes ids and hashes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray

from agentrl.domain.schemas import Float32, Int32
from agentrl.domain.tokens import little_endian

ERROR_BYTES = 4096
"""Maximum bytes of a stored error."""
CUT = b" [cut]"
_local = threading.local()  # zstd contexts must not be shared between threads


def compress(raw: bytes) -> bytes:
    """Any bytes as zstd."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=1)
    return bytes(_local.compressor.compress(raw))


def decompress(blob: bytes) -> bytes:
    """Inverse of `compress`."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return bytes(_local.decompressor.decompress(blob))


def pack_ids(ids: list[int] | Int32) -> bytes:
    """Token ids as zstd of little-endian int32."""
    return compress(little_endian("i", ids))


def unpack_ids(blob: bytes) -> Int32:
    """Inverse of `pack_ids`."""
    return np.frombuffer(decompress(blob), dtype="<i4").astype(np.int32, copy=False)


def pack_logprobs(logprobs: list[float] | Float32) -> bytes:
    """Logprobs as zstd of little-endian float32."""
    return compress(little_endian("f", logprobs))


def unpack_logprobs(blob: bytes) -> Float32:
    """Inverse of `pack_logprobs`."""
    return np.frombuffer(decompress(blob), dtype="<f4").astype(np.float32, copy=False)


def pack_tables(*tables: Float32) -> bytes:
    """Tables of numbers as zstd of their little-endian float32 (`planes`)."""
    return compress(b"".join(planes(table, "<f4") for table in tables))


def unpack_tables(blob: bytes, shape: tuple[int, int], rows: int) -> tuple[Float32, Float32]:
    """Inverse of `pack_tables` for two tables: one of this `shape`, one with this number of `rows`."""
    raw = decompress(blob)
    size = 4 * shape[0] * shape[1]
    first, second = from_planes(raw[:size], shape[0], "<f4"), from_planes(raw[size:], rows, "<f4")
    return first.astype(np.float32, copy=False), second.astype(np.float32, copy=False)


def planes(table: NDArray[Any], kind: str) -> bytes:
    """A table of numbers of four bytes, row by row; of a row the first bytes of all numbers, then the second ones, and
    so on. Signs and exponents repeat, so this compresses better.
    """
    numbers = np.ascontiguousarray(table.astype(kind, copy=False)).view(np.uint8).reshape(*table.shape, 4)
    return numbers.transpose(0, 2, 1).tobytes()


def from_planes(raw: bytes, rows: int, kind: str) -> NDArray[Any]:
    """Inverse of `planes`, for a table with this number of `rows`."""
    numbers = np.frombuffer(raw, np.uint8).reshape(rows, 4, len(raw) // (4 * max(1, rows)))
    return np.ascontiguousarray(numbers.transpose(0, 2, 1)).view(kind)[..., 0]


def pack_json(value: Any) -> bytes:
    """Any JSON value as zstd of its UTF-8 text."""
    return compress(orjson.dumps(value))


def unpack_json(blob: bytes) -> Any:
    """Inverse of `pack_json`."""
    return orjson.loads(decompress(blob))


def packed_text(blob: bytes) -> str:
    """The text of `pack_json`, not decoded: to look for a string before the value is built."""
    return decompress(blob).decode()


def json_text(value: Any) -> str:
    """A small JSON value as text, for a JSON column that is written in bulk."""
    return orjson.dumps(value).decode()


def read_json_text(text: str) -> Any:
    """Inverse of `json_text`; also reads NaN and infinity, which Python's encoder writes."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def content_hash(body: bytes) -> str:
    """The key of a body in `contents`."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Content:
    """JSON that many calls share. `body` is None when the store has it already."""

    hash: str
    body: bytes | None

    @classmethod
    def of(cls, value: Any) -> Content:
        """Pack and hash a value. Equal text has an equal hash; the order of keys is kept, because models see it."""
        body = pack_json(value)
        return cls(content_hash(body), body)


def hash_key(key: str) -> str:
    """The hash of a key that the store keeps. Keys are random 192-bit tokens, so a fast hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


def call_id(response_id: str) -> str:
    """The interaction id in a response id of any dialect; an interaction id is returned unchanged."""
    return response_id.removeprefix("chat").removeprefix("cmpl-").removeprefix("resp_").removeprefix("msg_")


def error_text(text: str) -> str:
    """An error as stored: at most ERROR_BYTES of UTF-8, without NUL, which PostgreSQL's text cannot hold."""
    data = text.replace("\0", "\ufffd").encode(errors="replace")
    if len(data) <= ERROR_BYTES:
        return data.decode()
    return data[: ERROR_BYTES - len(CUT)].decode(errors="ignore") + CUT.decode()


def first_id(seconds: float) -> str:
    """An id that sorts before every id made at `seconds` since the epoch or later."""
    return f"{int(seconds * 1000) << 16:016x}"


def stamp(made: str) -> str:
    """The time and the counter of an id; it sorts before the id, and after every id with an earlier one."""
    return made[:16]


_last_id = 0
_id_lock = threading.Lock()
_random = random.Random()  # seeded by the system
os.register_at_fork(after_in_child=_random.seed)


def new_id(after: str | None = None) -> str:
    """32 hex digits: 48 bits of milliseconds, 16 of a counter within this process, 64 random. Sorts by creation.

    If the clocks of processes differ, their ids may sort in another order. With `after`, the id sorts after that one.
    """
    global _last_id
    with _id_lock:
        stamp = max(int(time.time() * 1000) << 16, _last_id + 1)
        _last_id = stamp
    made = f"{stamp:016x}{_random.getrandbits(64):016x}"
    return made if after is None or made > after else f"{int(after, 16) + 1:032x}"
