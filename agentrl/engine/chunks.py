"""Chunks of new tokens, which an engine reports while it samples, with the weight versions that sampled them."""

from __future__ import annotations

import binascii
from dataclasses import dataclass

from agentrl.domain.schemas import VersionSpan
from agentrl.errors import EngineError

BASE = 0
"""The version of base weights. A server also reports it while it samples with an adapter."""
WITHOUT_WEIGHTS = ("released", "reloading")
"""The labels of a server whose weights are undefined. It is paused: no token is sampled under them."""
VERSION_DIGITS = 9
"""The store keeps versions as 32-bit integers."""
PIECE = 1 << 18
"""Characters of base64 that are decoded at once; a multiple of 4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New tokens of one response. `output_ids` and `logprobs` share one length, which may be 0."""

    output_ids: list[int]
    logprobs: list[float]  # of the temperature-scaled distribution
    finish_reason: str | None = None  # stop | length | abort; on the last chunk only
    matched_stop: int | str | None = None  # the token id or string that ended the output
    versions: list[VersionSpan] | None = None  # over all output tokens so far; None until the engine reports them
    version_label: int | None = None
    """The version that the engine reported with this chunk. Tokens sampled before a weight update may be sent after it,
    so this is an upper bound; `versions` is exact.
    """
    top_logprobs: list[list[tuple[float, int]]] | None = None  # (logprob, id) of the most likely tokens, per output id
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    retractions: int = 0  # how often the engine has put the request back into its queue, and computed it again
    routed_experts: str | None = None  # rows of `EngineClient.generate`, see `unpacked_experts`; on the last chunk only


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version's low-rank adapter on a server, used with the base weights."""

    name: str  # unique per set of weights
    version: int


def unpacked_experts(experts: str) -> bytes:
    """The int32 rows of `Chunk.routed_experts`. Raises EngineError for anything but base64.

    Other threads may run between its pieces: a prompt of 8,000 tokens may have 16 MB.
    """
    try:
        pieces = (experts[at : at + PIECE] for at in range(0, len(experts), PIECE))
        return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])
    except (ValueError, TypeError) as error:
        raise EngineError(f"the engine's routed experts are not base64: {error}") from error


def parse_version(label: str) -> int:
    """A version label as a number. Raises EngineError for other labels, such as the servers' own `default`."""
    version = version_of_label(label)
    if version is None:
        raise EngineError(f"weight version {label!r:.200} is not a number: start the server by agentrl, or label it 0")
    return version


def version_of_label(label: str) -> int | None:
    """A version label as a number; None for other labels, and for numbers that are no versions."""
    digits = str(label)
    return int(digits) if digits.isdecimal() and len(digits) <= VERSION_DIGITS else None
