"""The cause of a fork in one sentence, and what to do about it, by fork reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.diagnosis.fork_words import change, changed_tools, quote, words
from agentrl.diagnosis.forks import Fork, MessageDivergence
from agentrl.domain.schemas import ForkReason
from agentrl.rendering.messages import role_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A cause and a recommendation. `certain` is false when the calls alone do not prove the cause."""

    cause: str
    todo: str
    certain: bool = True


def advise(fork: Fork) -> Advice:
    """The cause of a fork and what to do. Uncertain when the messages suggest another reason."""
    advice = _BY_REASON[fork.reason](fork)
    if fork.reason is None or fork.seen in (None, fork.reason) or fork.reason not in _SHOWN_BY_MESSAGES:
        return advice
    seen = fork.seen.replace("_", " ")
    return replace(advice, cause=f"{advice.cause} (by the messages alone: {seen})", certain=False)


_SHOWN_BY_MESSAGES = (
    ForkReason.HISTORY_EDITED,
    ForkReason.ARGUMENTS_CHANGED,
    ForkReason.CALL_IDS_CHANGED,
    ForkReason.TEXT_DROPPED,
)


def _always(cause: str, todo: str, *, certain: bool = True) -> Callable[[Fork], Advice]:
    """Return the same advice for each fork, with `{at}`, `{change}`, `{tools}` and `{role}` of the cause filled in."""

    def advice(fork: Fork) -> Advice:
        facts = {
            "at": _place(fork.messages),
            "change": change(fork.messages),
            "tools": changed_tools(fork),
            "role": fork.call.role,
        }
        return Advice(cause=cause.format_map(facts), todo=todo, certain=certain)

    return advice


def _branch(fork: Fork) -> Advice:
    parent = fork.call.parent
    if parent is None:
        return Advice(
            cause="another conversation began before an earlier call was answered",
            todo="Nothing: parallel conversations are trajectories of their own.",
        )
    return Advice(
        cause=f"the client continued call {parent.number} a second time, with other messages",
        todo="Nothing, if the agent explores on purpose: both branches share every token up to there.",
    )


def _compacted(fork: Fork) -> Advice:
    advice = _always(
        cause="earlier turns were left out or replaced by a summary, from {at} on{change}",
        todo="Compact rarely, and many turns at once: each compaction begins a new trajectory.",
    )(fork)
    return replace(advice, certain=fork.seen is ForkReason.COMPACTED)


def _new_conversation(fork: Fork) -> Advice:
    if fork.call.raw:
        return Advice(
            cause="a raw prompt does not begin with an earlier prompt and its answer: it is a new conversation",
            todo="Nothing, if it is on purpose; else begin with the earlier prompt and its answer, unchanged.",
        )
    return Advice(
        cause="a new conversation begins, under the same system prompt (numbers and dates aside) and tools",
        todo="Nothing, if it is on purpose; else keep the history, and only append to it.",
        certain=False,
    )


def _history_edited(fork: Fork) -> Advice:
    return _raw_edited(fork) if fork.call.raw else _messages_edited(fork.messages)


def _raw_edited(fork: Fork) -> Advice:
    other = f"call {fork.tokens.other.number}" if fork.tokens else "an earlier call"
    if fork.leaves_out_the_end:
        return Advice(
            cause=f"a raw prompt continues {other} without the token that ended its answer",
            todo="Write that token behind the answer, whose text leaves it out, or send the ids of return_token_ids.",
        )
    return Advice(
        cause=f"a raw prompt begins with the prompt of {other}, and then differs from its answer",
        todo="Nothing, if it tries another answer on purpose; else put the answer behind its prompt unchanged.",
    )


def _messages_edited(found: MessageDivergence | None) -> Advice:
    if found is None or found.now is None:
        return Advice(
            cause="the history is not the one that was recorded", todo="Only append to the history.", certain=False
        )
    role = role_of(found.now)
    if found.before is not None and (role == "system") != (role_of(found.before) == "system"):
        return _system_prompt_toggled(found, role)
    if found.how in _MOVED and found.before is not None:
        return _misplaced(found)
    was = "sampled" if found.before is not None and found.before["role"] == "assistant" else "sent"
    cause = f"the client edited {_place(found)} ({role}): it is not what was {was}{change(found)}"
    return Advice(cause=cause, todo=_KEEP.get(role, "Only append to the history: say what is new in a new message."))


_KEEP = {
    "system": "Keep what changes (a date, a counter, a folder) out of the system prompt; say it in the newest message.",
    "assistant": "Send answers back unchanged, white space included.",
}


def _system_prompt_toggled(found: MessageDivergence, role: str) -> Advice:
    what = "added a system message at" if role == "system" else "left out the system message that was"
    return Advice(
        cause=f"the client {what} {_place(found)}",
        todo="Send the same system prompt with every call (in Responses: instructions, which do not carry over).",
    )


_MOVED = {"dropped": "dropped", "moved": "moved", "inserted": "inserted a new message at"}


def _misplaced(found: MessageDivergence) -> Advice:
    """Advice for one moved, dropped or inserted message."""
    assert found.before is not None
    assert found.now is not None
    shown = found.now if found.how == "inserted" else found.before
    cause = f"the client {_MOVED[str(found.how)]} {_place(found)} ({role_of(shown)}): {quote(words(shown), 0)}"
    return Advice(cause=cause, todo="Keep every message in its place; append new ones.")


def _place(found: MessageDivergence | None) -> str:
    return f"message {found.index + 1}" if found else "an earlier message"


_BY_REASON: dict[ForkReason | None, Callable[[Fork], Advice]] = {
    None: _branch,
    ForkReason.HISTORY_EDITED: _history_edited,
    ForkReason.ARGUMENTS_CHANGED: _always(
        cause="the client sent the tool call in {at} back with other arguments{change}",
        todo="Send tool calls back unchanged; do not fill in defaults or parse and re-serialise arguments.",
    ),
    ForkReason.CALL_IDS_CHANGED: _always(
        cause="the client changed a tool call's id in {at}, and the prompt is not token for token the same",
        todo="Keep the ids that the answer had, in the call and in its result.",
    ),
    ForkReason.TEXT_DROPPED: _always(
        cause="the client sent the tool call in {at} back without the text beside it{change}",
        todo="Send the content of an answer back with its tool calls; where the framework drops it, set "
        "proxy.restore_dropped_text.",
    ),
    ForkReason.TEMPLATE_REWROTE: _always(
        cause="the model's chat template writes earlier turns differently once new ones follow",
        todo="Use a chat template that only appends, or a renderer that knows this model's family.",
    ),
    ForkReason.REASONING_DROPPED: _always(
        cause="the chat template leaves the reasoning out of earlier turns",
        todo="Use a template or renderer setting that keeps reasoning, or accept one trajectory per turn.",
    ),
    ForkReason.TRUNCATED: _always(
        cause="the earlier answer was cut off before its end, and its text, sent back, becomes other tokens",
        todo="Allow more tokens (max_tokens), or let the agent stop where an answer is cut off.",
    ),
    ForkReason.TOOLS_CHANGED: _always(
        cause="the messages are the same but the tools are not{tools}",
        todo="Send the same tools, in the same words, with every call; forbid calls by tool_choice instead.",
    ),
    ForkReason.COMPACTED: _compacted,
    ForkReason.SUMMARY: _always(
        cause="the call wrote the summary that a later conversation continues from",
        todo="Nothing: a summary reads what it sums up. With the same system prompt and tools it extends that.",
    ),
    ForkReason.OTHER_AGENT: _always(
        cause="another agent speaks, by its system prompt and tools; it counts as {role}",
        todo="Nothing, if that is right; else send X-Turn-Type: main, side or subagent.",
        certain=False,
    ),
    ForkReason.NEW_CONVERSATION: _new_conversation,
}
