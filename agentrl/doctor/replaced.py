"""Reports requested sampling parameters that were replaced."""

from __future__ import annotations

from collections import Counter

from agentrl.doctor.record import Session
from agentrl.doctor.words import count

_API_NAMES = {"max_new_tokens": "max_tokens"}


def lines(session: Session) -> list[str]:
    """One line per parameter, with the requested values and the value used."""
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
    return (
        f"{count(len(calls), 'call')} asked for {_API_NAMES.get(name, name)} {wanted} and got {whose}: {', '.join(got)}"
    )


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
