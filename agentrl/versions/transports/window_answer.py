"""Where a part of a version file lies in a host's memory: what the host answers, and how it is asked for.

GET NAME/FILE, Range: bytes=0-16777215, Accept: WINDOW_TYPE   ─► 200 with a Window; 503: all are lent; 406: no NIXL
(the reader reads the memory)
DELETE NAME/FILE?window=ID                                    ─► 204
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from agentrl.errors import DamagedObject

WINDOW_TYPE = "application/vnd.agentrl.window+json"
WINDOW_BYTES = 16 << 20
"""Bytes of a window."""
MOST_ANSWER = 1 << 18
"""Size of the largest answer that is read."""


Size = Annotated[int, Meta(ge=1, le=WINDOW_BYTES)]


class Window(Struct, frozen=True, forbid_unknown_fields=True):
    """`size` bytes of a file, at `address` of the NIXL agent, for `seconds` from when they were asked for."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    agent: Annotated[str, Meta(min_length=1, max_length=MOST_ANSWER)]  # its metadata, in base64
    address: Annotated[int, Meta(ge=1, le=1 << 62)]
    size: Size
    seconds: Annotated[float, Meta(gt=0, le=3600)]

    @property
    def metadata(self) -> bytes:
        """The agent's metadata. Raises DamagedObject."""
        try:
            return base64.b64decode(self.agent, validate=True)
        except binascii.Error as error:
            raise DamagedObject(f"the metadata of an agent is damaged: {error}") from error


def read_window(data: bytes) -> Window:
    """The window of an answer. Raises DamagedObject for anything else."""
    try:
        return msgspec.json.decode(data, type=Window)
    except (ValueError, RecursionError) as error:
        raise DamagedObject(f"not a window: {error}") from error
