"""Splits a server-sent event stream into its events. Performs no I/O."""

from __future__ import annotations

DONE = b"[DONE]"
"""The payload of the event that ends a stream."""


class EventBuffer:
    """Splits a server-sent event stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an event that is not complete: the last one, with routed experts, is large

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data`, which is not empty, completes."""
        straddles = bool(self._parts) and self._parts[-1].endswith(b"\n") and data.startswith(b"\n")
        self._parts.append(data)
        if not straddles and b"\n\n" not in data:
            return []
        *events, rest = b"".join(self._parts).split(b"\n\n")
        self._parts = [rest] if rest else []
        return [line[5:].strip() for event in events for line in event.split(b"\n") if line.startswith(b"data:")]
