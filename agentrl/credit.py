"""From rewards (facts) to returns (computed): pure functions, so that a changed reward can be replayed."""

from __future__ import annotations

from collections.abc import Sequence


def turn_returns(call_rewards: Sequence[float | None], session_reward: float | None, discount: float) -> list[float]:
    """Discounted return of each main call of a session, in the order they were made.

    R_i = r_i + γ·R_{i+1}, where a call without a reward has r_i = 0 and the session's reward is added to the last
    call's. (AReaL's turn discount; with γ = 1 and only a session reward every call gets that reward.)
    """
    returns = [0.0] * len(call_rewards)
    following = 0.0
    for i in range(len(call_rewards) - 1, -1, -1):
        reward = call_rewards[i] or 0.0
        if i == len(call_rewards) - 1:
            reward += session_reward or 0.0
        following = reward + discount * following
        returns[i] = following
    return returns
