"""Decides whether returns are equal, in one way for advantages, leases, recorded pairs and evaluations."""

from __future__ import annotations

from collections.abc import Collection

TIE = 1e-9
"""Largest relative difference of equal returns: sums of rewards in different orders are rounded differently."""


def tied(returns: Collection[float]) -> bool:
    """Whether returns are equal but for rounding: max − min ≤ TIE · max(1, largest |R|). One return or none is tied."""
    if not returns:
        return True
    low, high = min(returns), max(returns)
    return high - low <= TIE * max(1.0, abs(low), abs(high))
