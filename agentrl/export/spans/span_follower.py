"""Sends the spans of sessions as they end, until it is told to stop.

    claim due sessions ──► send ──► sent: removed from the outbox
          ▲                  └────► the receiver is down: released; a wait of up to LONGEST_PAUSE_S
          └── POLL_S when none is due; else as long as the last batch took, so that a backlog leaves room for others

A process that dies leaves its claims, which end after LEASE_S: then the sessions are sent, some of them twice, with the
same ids.
"""

from __future__ import annotations

import logging
import threading
import time

from agentrl.errors import StoreError
from agentrl.export.spans.otlp_sender import EndpointDown
from agentrl.export.spans.trace_export import TraceExport
from agentrl.store import Database
from agentrl.store.sessions.ends import trace_outbox
from agentrl.visible import visible

log = logging.getLogger(__name__)
POLL_S = 2.0
CLAIMED = 32
"""Sessions that are sent together."""
LEASE_S = 300.0
LONGEST_PAUSE_S = 60.0
LAST_S = 3.0
"""How long a follower that is told to stop goes on sending what waits."""
LOG_EVERY_S = 600.0


class RareLog:
    """Logs warnings of one kind at most every LOG_EVERY_S."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def warn(self, message: str) -> None:
        """Log the message, unless another one was logged lately."""
        if time.monotonic() - self._last >= LOG_EVERY_S:
            self._last = time.monotonic()
            log.warning("%s", visible(message))


class SpanFollower:
    """Sends the waiting sessions of one run."""

    def __init__(self, database: Database, run_id: str, export: TraceExport, stop: threading.Event) -> None:
        self._database = database
        self._run_id = run_id
        self._export = export
        self._stop = stop
        self._failures = 0
        self._rejected = 0
        self._down, self._rejections, self._store = RareLog(), RareLog(), RareLog()

    def run(self) -> None:
        """Send until told to stop; then send what waits for at most LAST_S more, if the receiver is there."""
        while not self._stop.is_set():
            self._stop.wait(self.step())
        until = time.monotonic() + LAST_S
        while not self._failures and time.monotonic() < until and self._is_due():
            self.step()

    def step(self) -> float:
        """Send one batch of sessions, if any is due; returns the seconds to wait before the next."""
        began = time.monotonic()
        try:
            sent = self._send_due()
        except EndpointDown as error:
            self._failures += 1
            self._down.warn(f"{self._export.sender.endpoint.url} takes no spans, sessions wait: {error}")
            return max(error.retry_after_s, min(LONGEST_PAUSE_S, 2.0 ** min(self._failures, 10)))
        except StoreError as error:
            self._store.warn(f"{error}; trying again")
            return POLL_S
        if sent:
            self._failures = 0
        return min(LONGEST_PAUSE_S, time.monotonic() - began) if sent == CLAIMED else POLL_S

    def _is_due(self) -> bool:
        return self._database.query(trace_outbox.is_due, self._run_id)

    def _send_due(self) -> int:
        """Send due sessions; returns how many. Raises EndpointDown, StoreError."""
        if not self._is_due():
            return 0
        left = self._database.transact(trace_outbox.claim, self._run_id, CLAIMED, LEASE_S)
        claimed = len(left)
        try:
            for done in self._export.send(left):
                self._database.transact(trace_outbox.sent, done)
                left = [session_id for session_id in left if session_id not in done]
        except EndpointDown:
            self._database.transact(trace_outbox.release, left)
            raise
        counts = self._export.sender.counts
        if counts.rejected > self._rejected:
            self._rejected = counts.rejected
            self._rejections.warn(f"the receiver has rejected {counts.rejected} spans so far: {counts.reason}")
        return claimed
