"""Whether a trainer was told to stop, by a signal or by its caller."""

from __future__ import annotations

import signal
import threading


class Stop(threading.Event):
    """An event that SIGTERM and SIGINT set. `wait` is a sleep that ends when it is set."""

    def install(self) -> None:
        """Handle SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
