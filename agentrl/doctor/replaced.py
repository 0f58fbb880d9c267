"""Sampling parameters that calls asked for and did not get."""

from __future__ import annotations

from collections import Counter

from agentrl.doctor.record import Session
from agentrl.doctor.words import count

_SAID = {"max_new_tokens": "max_tokens"}


def lines(session: Session) -> list[str]:
    """One line for each parameter: how many calls asked for which values, and what they got."""
    names = dict.fromkeys(name for call in session.delivered for name in call.replaced)
    return [_line(session, name) for name in names]


def _line(session: Session, name: str) -> str:
    calls = [call for call in session.delivered if name in call.replaced]
    asked = Counter(_value(call.replaced[name]) for call in calls)
    got = dict.fromkeys(_value(call.used.get(name)) for call in calls)
    wanted = ", ".join(f"{value} ({n})" if len(asked) > 1 else value for value, n in asked.most_common())
    whose = "the evaluation's" if session.is_eval else "the run's"
    if name == "max_new_tokens":
        whose += ", or what the context had room for"
    return f"{count(len(calls), 'call')} asked for {_SAID.get(name, name)} {wanted} and got {whose}: {', '.join(got)}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
