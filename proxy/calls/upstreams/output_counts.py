"""Counts the output tokens of an upstream's answer."""

from __future__ import annotations

from agentrl.proxy.access.request_bounds import MAX_INT32
from agentrl.proxy.dialects.upstream_event import UpstreamEvent


class OutputCount:
    """The largest count that the answer reports. An answer without a report counts one token for each event."""

    def __init__(self) -> None:
        self._reported = 0
        self._events = 0

    def add(self, event: UpstreamEvent) -> None:
        """Count an event of a stream, or a whole answer. Streams repeat their total as it grows."""
        self._events += 1
        tokens = event.output_tokens
        if tokens is not None and 0 < tokens <= MAX_INT32:
            self._reported = max(self._reported, tokens)

    @property
    def tokens(self) -> int:
        """The number of output tokens so far."""
        return self._reported or self._events
