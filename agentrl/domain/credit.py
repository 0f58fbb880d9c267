"""Computes returns from rewards, by pure functions, so that a changed reward can be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.domain.schemas import Role


@dataclass(frozen=True, slots=True)
class CallFact:
    """The facts of a delivered call that its credit depends on."""

    id: str
    parent_id: str | None
    role: str  # a `schemas.Role`

    @property
    def is_main(self) -> bool:
        """Whether the call is a turn of the agent itself."""
        return self.role == Role.MAIN

    @property
    def shares(self) -> bool:
        """Whether the call shares the session's outcome."""
        return self.role in (Role.MAIN, Role.SUBAGENT)


@dataclass(frozen=True, slots=True)
class SessionRewards:
    """The rewards of a session that count, summed over their names.

    `session` is for the whole episode; `branches` and `calls` are by call id. A call's reward belongs to the sequence
    of main calls; a branch's reward only to the path that leads to its call. `named` has the rewards of each name
    alone.
    """

    session: float | None = None
    branches: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    named: Mapping[str, SessionRewards] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        """Whether the session was rewarded at all."""
        return self.session is not None or bool(self.branches) or bool(self.calls)

    @property
    def total(self) -> float:
        """The sum of all rewards."""
        return (self.session or 0.0) + sum(self.branches.values()) + sum(self.calls.values())


def newest(facts: Iterable[tuple[str | None, str, str, float]]) -> dict[tuple[str | None, str, str], float]:
    """The last value of each (call id, scope, name): the one that counts.

    `facts` are (call id, scope, name, value), oldest first.
    """
    return {(call_id, scope, name): value for call_id, scope, name, value in facts}


def counting(facts: Iterable[tuple[str | None, str, str, float]]) -> SessionRewards:
    """The rewards of a session that count, summed and by name; `facts` as `newest` takes them."""
    counted = newest(facts)
    by_name: dict[str, dict[tuple[str | None, str, str], float]] = {}
    for key, value in counted.items():
        by_name.setdefault(key[2], {})[key] = value
    return replace(_summed(counted), named={name: _summed(own) for name, own in by_name.items()})


def summed(named: Mapping[str, SessionRewards]) -> SessionRewards:
    """The rewards of a session from those of each name."""
    sessions = [own.session for own in named.values() if own.session is not None]
    branches: dict[str, float] = {}
    calls: dict[str, float] = {}
    for own in named.values():
        for total, of_name in ((branches, own.branches), (calls, own.calls)):
            for call_id, value in of_name.items():
                total[call_id] = total.get(call_id, 0.0) + value
    return SessionRewards(sum(sessions) if sessions else None, branches, calls, named)


def _summed(counted: Mapping[tuple[str | None, str, str], float]) -> SessionRewards:
    session: float | None = None
    totals: dict[str, dict[str, float]] = {"branch": {}, "call": {}}
    for (call_id, scope, _), value in counted.items():
        if call_id is None:
            session = value + (session or 0.0)
        else:
            totals[scope][call_id] = value + totals[scope].get(call_id, 0.0)
    return SessionRewards(session, totals["branch"], totals["call"])


def call_returns(calls: Sequence[CallFact], rewards: SessionRewards, discount: float) -> dict[str, float]:
    """Call id → return, for every call of a session that carries value. Takes `calls` in the order they were made.

    The main calls form one sequence, across forks and compactions: R_i = r_i + γ·R_{i+1} (AReaL's turn discount). The
    session's reward is added to r of the last call. The calls of each conversation of a sub-agent form another such
    sequence, with the session's reward at its last call. A branch's reward b adds γ^k·b to the k-th of these calls
    before the rewarded one on its path. The return of a side call is its own reward; without one it has no return. The
    first entry is that of the first main call, if there is one.
    """
    returns: dict[str, float] = {}
    for thread in [[call.id for call in calls if call.is_main], *_conversations(calls)]:
        returns |= dict.fromkeys(thread, 0.0)
        following = 0.0
        for i, call_id in reversed(list(enumerate(thread))):
            reward = rewards.calls.get(call_id, 0.0)
            if i == len(thread) - 1:
                reward += rewards.session or 0.0
            following = reward + discount * following
            returns[call_id] = following
    for call in calls:
        if not call.shares and call.id in rewards.calls:
            returns[call.id] = rewards.calls[call.id]
    by_id = {call.id: call for call in calls}
    for call_id, reward in rewards.branches.items():
        node = by_id.get(call_id)
        credit = reward
        while node is not None:
            if node.shares or node.id == call_id:
                returns[node.id] = returns.get(node.id, 0.0) + credit
                credit *= discount
            node = by_id.get(node.parent_id or "")
    return returns


def _conversations(calls: Sequence[CallFact]) -> list[list[str]]:
    """The ids of the sub-agents' calls, a list for each conversation (calls that extend one another), in order."""
    by_id = {call.id: call for call in calls}
    first: dict[str, str] = {}  # call → first call of its conversation; parents come before the calls that extend them
    found: dict[str, list[str]] = {}
    for call in calls:
        if call.role != Role.SUBAGENT:
            continue
        parent = by_id.get(call.parent_id or "")
        first[call.id] = first.get(parent.id, call.id) if parent is not None else call.id
        found.setdefault(first[call.id], []).append(call.id)
    return list(found.values())


def outcome(calls: Sequence[CallFact], returns: Mapping[str, float]) -> float:
    """The return of a session for baselines: that of its first main call; 0 without one."""
    return next((returns[call.id] for call in calls if call.is_main), 0.0)


def named_outcomes(calls: Sequence[CallFact], rewards: SessionRewards, discount: float) -> dict[str, float]:
    """Name of a reward → `outcome` of the rewards of that name alone. They add up to the session's outcome."""
    return {name: outcome(calls, call_returns(calls, own, discount)) for name, own in rewards.named.items()}
