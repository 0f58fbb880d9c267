"""The doctor's report as data, for `--json` and for the screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from agentrl.diagnosis import advice, figures, forks, verdict
from agentrl.diagnosis.advice import Advice
from agentrl.diagnosis.figures import Figures
from agentrl.diagnosis.forks import Fork
from agentrl.diagnosis.record import Session
from agentrl.diagnosis.verdict import Verdict
from agentrl.domain.schemas import Json
from agentrl.visible import visible

AROUND = 8
"""Tokens to show before and after the first difference."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report. `decode` converts ids to text; None without the model's tokenizer."""

    session: Session
    forks: list[Fork]
    figures: Figures
    verdict: Verdict
    decode: Decode | None
    subagents: list[Report]
    command_status: int | None = None

    def advice(self, fork: Fork) -> Advice:
        """The cause of a fork and what to do."""
        return advice.advise(fork)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbourhood:
    """The text around the first different token, in the other sequence and in the call's prompt.

    Each is (before, token, after) with control characters escaped. Without a tokenizer it has ids instead of text.
    """

    theirs: tuple[str, str, str]
    ours: tuple[str, str, str]


def make(session: Session, decode: Decode | None, command_status: int | None = None) -> Report:
    """Examine a session and its sub-agents' sessions; the verdict covers all of them."""
    below = [make(subagent, decode) for subagent in session.subagents]
    found = forks.find(session)
    counted = figures.of(session, found)
    judged = verdict.of(session, counted, found, command_status)
    if below:
        judged = verdict.together(session, judged, [(one.session, one.verdict) for one in below])
    return Report(
        session=session,
        forks=found,
        figures=counted,
        verdict=judged,
        decode=decode,
        subagents=below,
        command_status=command_status,
    )


def neighbourhood(report: Report, fork: Fork) -> Neighbourhood | None:
    """The tokens around a fork's first different token."""
    if fork.tokens is None:
        return None
    at = fork.tokens.position
    return Neighbourhood(
        theirs=_window(report.decode, fork.tokens.other.sequence, at),
        ours=_window(report.decode, fork.call.prompt_ids, at),
    )


def as_json(report: Report) -> Json:
    """The report as JSON. Calls have their ids and numbers."""
    session = report.session
    return {
        "session_id": session.id,
        "status": session.status,
        "name": session.name,
        "command_status": report.command_status,
        "verdict": asdict(report.verdict),
        "figures": asdict(report.figures),
        "calls": [
            {
                "number": call.number,
                "id": call.id,
                "parent": call.parent and call.parent.number,
                "role": call.role,
                "dialect": call.dialect,
                "status": call.status,
                "finish_reason": call.finish,
                "error": call.error,
                "new_prompt_tokens": len(call.delta_ids),
                "prompt_tokens": call.prompt_tokens,
                "output_tokens": call.output_tokens,
                "versions": call.versions,
                "fork_reason": call.reason,
                "retry": call.retry,
                "distribution_modified": call.modified,
                "greedy": call.greedy,
                "replaced": call.replaced,
            }
            for call in session.calls
        ],
        "refusals": session.refusals,
        "forks": [_fork_json(report, fork) for fork in report.forks],
        "subagents": [as_json(subagent) for subagent in report.subagents],
    }


def _fork_json(report: Report, fork: Fork) -> Json:
    advised, near, tokens, messages = report.advice(fork), neighbourhood(report, fork), fork.tokens, fork.messages
    return {
        "call": fork.call.number,
        "kind": fork.kind,
        "reason": fork.reason,
        "cause": advised.cause,
        "todo": advised.todo,
        "certain": advised.certain,
        "cost_tokens": fork.cost_tokens,
        "first_different_token": tokens
        and {
            "position": tokens.position,
            "other_call": tokens.other.number,
            "other_id": tokens.theirs,
            "id": tokens.ours,
            "text": near and asdict(near),
        },
        "first_different_message": messages
        and {
            "index": messages.index,
            "other_call": messages.other.number,
            "before": messages.before,
            "now": messages.now,
            "how": messages.how,
        },
    }


def _window(decode: Decode | None, ids: Sequence[int], at: int) -> tuple[str, str, str]:
    parts = ids[max(0, at - AROUND) : at], ids[at : at + 1], ids[at + 1 : at + 1 + AROUND]
    before, token, after = (visible(decode(part)) if decode else " ".join(map(str, part)) for part in parts)
    return before, token, after
