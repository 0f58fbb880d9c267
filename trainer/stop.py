"""Whether a trainer was told to stop, by a signal or by its caller."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stop:
    """A flag that SIGTERM and SIGINT set. `wait` is a sleep that ends when the flag is set."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> None:
        """Handle SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def set(self) -> None:
        """Stop, as a signal would."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep; returns true at once when the flag is set."""
        return self._event.wait(seconds)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.set()
