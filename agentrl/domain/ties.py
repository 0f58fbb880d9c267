"""When returns are equal: one definition for advantages, leases, recorded pairs and evaluations."""

from __future__ import annotations

from collections.abc import Collection

TIE = 1e-9
"""Differences of returns that rounding makes: rewards that are added up in another order."""


def tied(returns: Collection[float]) -> bool:
    """Whether returns are equal but for rounding: max − min ≤ TIE · max(1, largest |R|). One return is; so are none."""
    if not returns:
        return True
    low, high = min(returns), max(returns)
    return high - low <= TIE * max(1.0, abs(low), abs(high))
