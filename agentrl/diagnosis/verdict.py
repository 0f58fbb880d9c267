"""Decides whether an agent can be trained, and lists its problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentrl.diagnosis import advice, call_notes, coders
from agentrl.diagnosis.figures import Figures, why_untrainable
from agentrl.diagnosis.forks import Fork
from agentrl.diagnosis.record import Session
from agentrl.diagnosis.words import count
from agentrl.domain.schemas import GONE
from agentrl.store.sessions.ends.sealing import PARENT_ENDED

LOW_MERGE_RATE = 0.5


class Answer(StrEnum):
    """The verdict in one phrase."""

    TRAINABLE = "trainable"
    WITH_PROBLEMS = "trainable, with problems"
    NOT_TRAINABLE = "not trainable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict. `problems` are the reasons against training; `notes` are further findings."""

    answer: Answer
    problems: list[str]
    notes: list[str]


def of(session: Session, figures: Figures, forks: Sequence[Fork], command_status: int | None = None) -> Verdict:
    """The verdict on a session. `command_status` is the exit status of the program that ran it."""
    stops = _stops(session, figures)
    problems = [] if stops else _problems(session, figures, forks)
    if session.status in GONE and session.error not in (None, "", PARENT_ENDED) and not command_status:
        problems.append(
            f"the session {'was ' if session.status == 'abandoned' else ''}{session.status}: {session.error}"
        )
    if command_status:
        problems.append(f"the command ended with exit status {command_status}")
    answer = Answer.NOT_TRAINABLE if stops else Answer.WITH_PROBLEMS if problems else Answer.TRAINABLE
    return Verdict(answer=answer, problems=[*stops, *problems], notes=_notes(session, figures, forks))


def together(session: Session, own: Verdict, subagents: Sequence[tuple[Session, Verdict]]) -> Verdict:
    """The verdict on a session and its sub-agents. The answer is NOT_TRAINABLE only if every one of them has it."""
    judged = [verdict.answer for _, verdict in subagents]
    if session.calls or own.problems:
        judged.append(own.answer)
    answer = judged[0] if len(set(judged)) == 1 else Answer.WITH_PROBLEMS
    problems = [f"{subagent.title}: {problem}" for subagent, verdict in subagents for problem in verdict.problems]
    return Verdict(answer=answer, problems=[*own.problems, *problems], notes=own.notes)


def _stops(session: Session, figures: Figures) -> list[str]:
    """The reasons why none of the session's tokens can be trained; empty if some can."""
    if not figures.calls and session.refusals:
        return call_notes.refused(session.refusals)
    if not figures.calls and session.subagents:
        return []
    if not figures.calls:
        return [
            "no call reached the proxy: the program must take its address and key from OPENAI_BASE_URL and "
            "OPENAI_API_KEY (or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY)"
        ]
    if not figures.delivered:
        kinds = Counter(call.status if call.role != "upstream" else "for another model" for call in session.calls)
        what = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        return [f"no answer of the policy was delivered: {what}{_first_error(session)}"]
    if figures.trainable_tokens:
        return []
    if not figures.sampled_tokens:
        return ["every answer is empty: no token was sampled"]
    causes = Counter(why_untrainable(call, session) for call in session.delivered if call.output_tokens)
    reasons = "; ".join(f"{n} {_MEANING[cause]}" for cause, n in causes.items() if cause is not None)
    return [f"no sampled token can be trained: {reasons}"]


_MEANING = {
    "sampled from another distribution": "sampled from another distribution than the policy's (leave out top_p, top_k, "
    "min_p, penalties, logit_bias, response_format, forced tool calls)",
    "greedy": "greedy (send no temperature 0)",
    "side call without a reward of its own": "are side calls without a reward of their own",
}


def _problems(session: Session, figures: Figures, forks: Sequence[Fork]) -> list[str]:
    """Problems of a trainable session."""
    found: list[str] = []
    if figures.merge_rate is not None and figures.merge_rate < LOW_MERGE_RATE:
        costly = [fork for fork in forks if fork.costly]
        causes = Counter(str(fork.reason) for fork in costly)
        (cause, n), *_ = causes.most_common(1)
        example = next(fork for fork in costly if fork.reason == cause)
        found.append(
            f"only {figures.extending} of {figures.continuing} calls extend an earlier one; {cause.replace('_', ' ')} "
            f"{n} times, first at call {example.call.number}: {advice.advise(example).cause}"
        )
    if figures.lost:
        found.append(f"{count(figures.lost, 'answer')} lost: a proxy died while it served")
    for share, what in ((figures.ids, "ids"), (figures.logprobs, "logprobs"), (figures.versions, "versions")):
        if share is not None and share < 1:
            found.append(f"{what} cover only {share:.1%} of what was sampled")
    return found


def _notes(session: Session, figures: Figures, forks: Sequence[Fork]) -> list[str]:
    found = call_notes.refused(session.refusals) if figures.calls else []
    found += [*call_notes.left_out(session), *call_notes.replaced(session)]
    costly = [fork for fork in forks if fork.costly]
    if costly and figures.merge_rate is not None and figures.merge_rate >= LOW_MERGE_RATE:
        named = ", ".join(f"call {fork.call.number} ({str(fork.reason).replace('_', ' ')})" for fork in costly[:5])
        found.append(f"{count(len(costly), 'call')} could not extend an earlier one: {named}")
    if not figures.calls and session.subagents:
        found.append("the session itself made no call: its sub-agents did, in sessions of their own")
    if session.status == "abandoned" and session.error is None and session.parent_id is None:
        found.append("the session was abandoned: none of it is trained")
    if figures.calls and not session.rewards and session.parent_id is None:  # a sub-agent shares its parent's reward
        found.append("no reward was given: a session trains only once it is rewarded")
    if session.is_eval:
        found.append("an evaluation session: its findings apply to training, but it is not trained itself")
    if figures.untrainable_tokens and figures.trainable_tokens:
        found.append(f"{count(figures.untrainable_tokens, 'sampled token')} cannot be trained (see the summary)")
    if figures.failed:
        found.append(f"{count(figures.failed, 'call')} failed{_first_error(session)}")
    if figures.aborted:
        found.append(f"{count(figures.aborted, 'call')} aborted: the client did not wait for the answer")
    if figures.running:
        found.append(f"{count(figures.running, 'call')} still running")
    return found + coders.lines(session, [fork.reason for fork in forks])


def _first_error(session: Session) -> str:
    error = next((call.error for call in session.calls if call.error), None)
    return f" ({error[:200]})" if error else ""
