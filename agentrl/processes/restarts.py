"""When a process that died is started again: after which wait, and how often at most."""

from __future__ import annotations

from pathlib import Path

LIVED_S = 5.0
"""A process that lived this long has started well: when it dies it is restarted at once."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 10.0
DEATHS_WINDOW_S = 600.0
"""How long a death counts against the restart limit."""
USER_ERROR_STATUS = 2
"""Exit status of a process whose input was wrong. Another start would not help."""


class Backoff:
    """Counts one process's quick deaths in a row: those before it has lived `lived_s`."""

    def __init__(self, lived_s: float = LIVED_S) -> None:
        self.quick_deaths = 0
        self._lived_s = lived_s

    def after(self, lived_s: float) -> float:
        """Seconds to wait after one more death: 0, or 0.5, 1, 2, … up to BACKOFF_MAX_S while deaths are quick."""
        self.quick_deaths = self.quick_deaths + 1 if lived_s < self._lived_s else 0
        return pause_s(self.quick_deaths)


def pause_s(quick_deaths: int) -> float:
    """Seconds to wait after `quick_deaths` quick deaths in a row."""
    return min(BACKOFF_FIRST_S * 2.0 ** min(quick_deaths - 1, 30), BACKOFF_MAX_S) if quick_deaths else 0.0


def gave_up(name: str, deaths: int, status: int, last_line: str, log_file: Path) -> str:
    """Why a process is not started again after too many deaths."""
    return f"{name} died {deaths} times, last with status {status}: {last_line} (see {log_file})"
