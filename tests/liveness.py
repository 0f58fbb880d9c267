"""Whether processes still run."""

from __future__ import annotations

import psutil


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not awaited does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
