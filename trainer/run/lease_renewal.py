"""Renews the lease on the GPUs' memory while a step is computed, and ends the process when that fails for too long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from agentrl import visible
from agentrl.errors import StoreError

LEASE_S = 60.0
RENEW_EVERY_S = 5.0
EXIT_BEFORE_S = 10.0
"""How long before the end of a lease that could not be renewed the process exits."""
LOST_STATUS = 1


class Renewal:
    """Renews a lease in a thread until `stop`. Another thread watches its end, since a database may not answer.

    `renew` returns false when the lease is over, and may raise StoreError. `renewed_at` (monotonic) is at or before the
    last renewal. `end` ends the process at once: engines take back the memory that it has.
    """

    def __init__(
        self,
        renew: Callable[[], bool],
        renewed_at: float,
        end: Callable[[int], None] = os._exit,
        every_s: float = RENEW_EVERY_S,
    ) -> None:
        self._renew = renew
        self._every_s = every_s
        self._end = end
        self._until = renewed_at + LEASE_S - EXIT_BEFORE_S
        self._over = threading.Event()
        for work in (self._run, self._watch):
            threading.Thread(target=work, name="memory-lease", daemon=True).start()

    def stop(self) -> None:
        """Stop renewing."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            asked_at = time.monotonic()
            try:
                renewed = self._renew()
            except StoreError as error:
                visible.say(f"the lease on the GPUs' memory could not be renewed: {error}; trying again", err=True)
                continue
            if not renewed:
                return self._lost("it is over")
            self._until = asked_at + LEASE_S - EXIT_BEFORE_S

    def _watch(self) -> None:
        while not self._over.wait(max(0.0, self._until - time.monotonic())):
            if time.monotonic() >= self._until:
                return self._lost("it was not renewed in time")

    def _lost(self, why: str) -> None:
        if not self._over.is_set():
            self._over.set()
            visible.say(f"agentrl trainer: ended, because its lease on the GPUs' memory is lost: {why}", err=True)
            self._end(LOST_STATUS)
