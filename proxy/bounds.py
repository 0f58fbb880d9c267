"""How much of what callers send is stored."""

from __future__ import annotations

MAX_INT32 = 2**31 - 1
"""The largest number of a step, a version, an epoch or a count that every database holds."""
