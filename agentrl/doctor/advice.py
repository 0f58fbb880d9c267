"""Why a call forks, in one plain sentence, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.doctor.forks import Fork, MessageDivergence
from agentrl.domain.schemas import ForkReason, Json
from agentrl.rendering.messages import role_of, text_of
from agentrl.visible import visible

QUOTE_CHARS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """`certain` is false where calls alone cannot show the cause."""

    cause: str
    todo: str
    certain: bool = True


def of(fork: Fork) -> Advice:
    """The cause of a fork. It is uncertain where the recorded reason rests on a guess, or messages show another."""
    found = _advice(fork)
    if fork.reason is None or fork.seen in (None, fork.reason) or fork.reason not in _SHOWN_BY_MESSAGES:
        return found
    seen = fork.seen.replace("_", " ")
    return Advice(cause=f"{found.cause} (by the messages alone: {seen})", todo=found.todo, certain=False)


_SHOWN_BY_MESSAGES = (
    ForkReason.HISTORY_EDITED,
    ForkReason.ARGUMENTS_CHANGED,
    ForkReason.CALL_IDS_CHANGED,
    ForkReason.TEXT_DROPPED,
)


def _advice(fork: Fork) -> Advice:
    at = f"message {fork.messages.index + 1}" if fork.messages else "an earlier message"
    parent = fork.call.parent
    match fork.reason:
        case None if parent is None:
            return Advice(
                cause="another conversation began before an earlier call was answered",
                todo="Nothing: parallel conversations are trajectories of their own.",
            )
        case None:
            assert parent is not None
            return Advice(
                cause=f"the client went on from call {parent.number} a second time, with other messages",
                todo="Nothing, if it explores on purpose: both ways share every token up to there.",
            )
        case ForkReason.HISTORY_EDITED if fork.call.raw:
            return _raw(fork)
        case ForkReason.HISTORY_EDITED:
            return _edited(fork.messages, at)
        case ForkReason.ARGUMENTS_CHANGED:
            return Advice(
                cause=f"the client sent the tool call in {at} back with other arguments{_change(fork.messages)}",
                todo="Send tool calls back as they came; do not fill in defaults or parse and re-serialise arguments.",
            )
        case ForkReason.CALL_IDS_CHANGED:
            return Advice(
                cause=f"the client changed a tool call's id in {at}, and the prompt is not token for token the same",
                todo="Keep the ids that the answer had, in the call and in its result.",
            )
        case ForkReason.TEXT_DROPPED:
            return Advice(
                cause=f"the client sent the tool call in {at} back without the text beside it{_change(fork.messages)}",
                todo="Send the content of an answer back with its tool calls; where the framework drops it, set "
                "proxy.restore_dropped_text.",
            )
        case ForkReason.TEMPLATE_REWROTE:
            return Advice(
                cause="the model's chat template writes earlier turns differently once new ones follow",
                todo="Use a chat template that only appends, or a renderer that knows this model's family.",
            )
        case ForkReason.REASONING_DROPPED:
            return Advice(
                cause="the chat template leaves the reasoning out of earlier turns",
                todo="Use a template or renderer setting that keeps reasoning, or accept one trajectory per turn.",
            )
        case ForkReason.TRUNCATED:
            return Advice(
                cause="the earlier answer was cut off before its end, and sent back its text is other tokens",
                todo="Allow more tokens (max_tokens), or let the agent stop where an answer is cut off.",
            )
        case ForkReason.TOOLS_CHANGED:
            return Advice(
                cause=f"the messages are the same but the tools are not{_tools(fork)}",
                todo="Send the same tools, in the same words, with every call; forbid calls by tool_choice instead.",
            )
        case ForkReason.COMPACTED:
            return Advice(
                cause=f"earlier turns were left out or replaced by a summary, from {at} on{_change(fork.messages)}",
                todo="Compact rarely, and far at once: each time begins a new trajectory.",
                certain=fork.seen is ForkReason.COMPACTED,
            )
        case ForkReason.SUMMARY:
            return Advice(
                cause="the call wrote the summary with which a later conversation goes on",
                todo="Nothing: a summary reads what it sums up. With the same system prompt and tools it extends that.",
            )
        case ForkReason.OTHER_AGENT:
            return Advice(
                cause=f"another agent speaks, by its system prompt and tools; it counts as {fork.call.role}",
                todo="Nothing, if that is right; else send X-Turn-Type: main, side or subagent.",
                certain=False,
            )
        case ForkReason.NEW_CONVERSATION if fork.call.raw:
            return Advice(
                cause="a raw prompt that begins with no earlier prompt and its answer: a conversation of its own",
                todo="Nothing, if it is on purpose; else begin with the earlier prompt and its answer, as they were.",
            )
        case ForkReason.NEW_CONVERSATION:
            return Advice(
                cause="a new conversation begins, under the same system prompt (numbers and dates aside) and tools",
                todo="Nothing, if it is on purpose; else keep the history, and only append to it.",
                certain=False,
            )


def _raw(fork: Fork) -> Advice:
    other = f"call {fork.tokens.other.number}" if fork.tokens else "an earlier call"
    if fork.leaves_out_the_end:
        return Advice(
            cause=f"a raw prompt goes on from {other} without the token that ended its answer",
            todo="Write that token behind the answer, whose text leaves it out, or send the ids of return_token_ids.",
        )
    return Advice(
        cause=f"a raw prompt begins with that of {other}, and goes on otherwise than it was answered",
        todo="Nothing, if it tries another way on purpose; else put the answer behind its prompt exactly as it came.",
    )


def _edited(found: MessageDivergence | None, at: str) -> Advice:
    if found is None or found.now is None:
        return Advice(
            cause="the history is not the one that was recorded", todo="Only append to the history.", certain=False
        )
    role = role_of(found.now)
    if found.before is not None and (role == "system") != (role_of(found.before) == "system"):
        what = "put a system message in at" if role == "system" else "left the system message out that was"
        return Advice(
            cause=f"the client {what} {at}",
            todo="Send the same system prompt with every call (in Responses: instructions, which do not carry over).",
        )
    if found.how in _MOVED and found.before is not None:
        return _misplaced(found)
    was = "sampled" if found.before is not None and found.before["role"] == "assistant" else "sent"
    cause = f"the client edited {at} ({role}), which reads otherwise than it was {was}{_change(found)}"
    if role == "system":
        todo = "Keep what changes (a date, a counter, a folder) out of the system prompt; say it in the newest message."
    elif role == "assistant":
        todo = "Send answers back exactly as they came, with white space, and without filling in or stripping anything."
    else:
        todo = "Only append to the history: put news into a new message, not into an old one."
    return Advice(cause=cause, todo=todo)


_MOVED = ("dropped", "moved", "inserted")


def _misplaced(found: MessageDivergence) -> Advice:
    """Messages that read as they did, one of them in another place, missing, or new among them."""
    assert found.before is not None
    assert found.now is not None
    shown = found.now if found.how == "inserted" else found.before
    what = {"dropped": "dropped", "moved": "moved", "inserted": "put a new message in at"}[str(found.how)]
    cause = f"the client {what} message {found.index + 1} ({role_of(shown)}): {_cut(_words(shown), 0)}"
    return Advice(cause=cause, todo="Keep every message, where it was: put news behind the last one.")


def _change(found: MessageDivergence | None) -> str:
    if found is None or found.before is None or found.now is None:
        return ""
    before, now = _words(found.before), _words(found.now)
    if before == now:
        return ""
    start = max(0, next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), 0) - 12)
    return f": {_cut(before, start)} became {_cut(now, start)}"


def _words(message: Json) -> str:
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    content = message.get("content")
    text = (
        text_of(message) if not isinstance(content, list) else " ".join(str(part.get("text", "")) for part in content)
    )
    return visible(" ".join([text, *calls] if text else calls))


def _cut(text: str, start: int) -> str:
    part = text[start : start + QUOTE_CHARS]
    return f"“{'…' if start else ''}{part}{'…' if start + QUOTE_CHARS < len(text) else ''}”"


def _tools(fork: Fork) -> str:
    if fork.messages is not None or fork.tokens is None:
        return ""
    before, now = (
        {tool["function"]["name"] for tool in tools or []} for tools in (fork.tokens.other.tools, fork.call.tools)
    )
    parts = [
        f"{word} {', '.join(sorted(names))}"
        for word, names in (("with", now - before), ("without", before - now))
        if names
    ]
    return f": {', '.join(parts)}" if parts else ""
