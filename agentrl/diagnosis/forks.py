"""Finds the forks of a session's token tree: the first different token and message, and the cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.diagnosis.record import Call, Session
from agentrl.domain.schemas import STARTS, ForkReason, Json
from agentrl.rendering.conversation import root_key
from agentrl.rendering.divergence import Change, Divergence, PlainMessages, change, common, compare, nearest


@dataclass(frozen=True, kw_only=True)
class TokenDivergence:
    """The first `position` tokens equal those of `other`; then `other` has `theirs` and the call has `ours`."""

    other: Call
    position: int
    theirs: int | None  # None: the sequence ends there
    ours: int | None


@dataclass(frozen=True, kw_only=True)
class MessageDivergence:
    """Message `index` (from 0) differs from that of `other`; None where a conversation has ended."""

    other: Call
    index: int
    before: Json | None
    now: Json | None
    how: Change | None  # how the message changed; None where a conversation has ended


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A call that forks. `seen` is the reason that the messages alone suggest."""

    call: Call
    reason: ForkReason | None
    seen: ForkReason | None
    tokens: TokenDivergence | None
    messages: MessageDivergence | None
    cost_tokens: int  # prompt tokens that had already been processed

    @property
    def kind(self) -> str:
        """The reason, else `branch` (from an earlier call) or `parallel` (to a call without an answer yet)."""
        return self.reason or ("branch" if self.call.parent else "parallel")

    @property
    def costly(self) -> bool:
        """Whether a call should have extended another and did not. Summaries are exempt."""
        return self.reason not in (*STARTS, ForkReason.SUMMARY)

    @property
    def leaves_out_the_end(self) -> bool:
        """Whether only the last token of the other call is missing before the call continues."""
        return self.tokens is not None and self.tokens.position == len(self.tokens.other.sequence) - 1


def find(session: Session) -> list[Fork]:
    """All forks, oldest first: roots after the first, and branches other than retries and parallel samples."""
    known = PlainMessages()
    return [_fork(call, earlier, known) for call, earlier in _departures(session)]


def token_divergence(call: Call, earlier: Sequence[Call]) -> TokenDivergence | None:
    """Compare with the earlier sequence that shares the longest prefix with the call's prompt; ties go to
    the latest.
    """
    ancestors = set(call.path)
    best, rank = None, (-1, False, -1)
    for other in earlier:
        shared = shared_tokens(call.prompt_ids, other.sequence)
        candidate = (shared, other not in ancestors, other.number)
        if candidate > rank:
            best, rank = other, candidate
    if best is None:
        return None
    at = rank[0]
    theirs = best.sequence[at] if at < len(best.sequence) else None
    ours = call.prompt_ids[at] if at < len(call.prompt_ids) else None
    return TokenDivergence(other=best, position=at, theirs=theirs, ours=ours)


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences, by binary search with slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_subsequence(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common subsequence of two sequences.

    Bit-parallel (Hyyrö 2004): bit i of `left` is 0 once token i of `one` is part of the subsequence; O(n·m/64).
    """
    places: dict[int, int] = {}
    for i, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << i
    full = (1 << len(one)) - 1
    left = full
    for token in other:
        here = left & places.get(token, 0)
        left = (left + here | left - here) & full
    return len(one) - left.bit_count()


def _departures(session: Session) -> Iterator[tuple[Call, list[Call]]]:
    earlier: list[Call] = []
    for call in session.delivered:
        siblings = [other for other in earlier if other.parent is call.parent]
        parallel = any(other.prompt_ids == call.prompt_ids for other in siblings)
        if call.reason is not None or (siblings and not parallel):
            yield call, list(earlier)
        earlier.append(call)


def _fork(call: Call, earlier: list[Call], known: PlainMessages) -> Fork:
    """Build the fork of a call. `known` holds the canonical messages of the session's conversations."""
    reason = ForkReason(call.reason) if call.reason else None
    kin, found = _kin(call, earlier, known)
    if call.raw:  # raw prompts have tokens but no messages
        tokens = token_divergence(call, _begun_with(call, earlier))
        kin, found = tokens.other if tokens else None, None
    else:  # compare with the ancestor by messages; for a new conversation, with the closest one by tokens
        stems = kin is not None and (reason not in STARTS or call.parent is not None)
        tokens = token_divergence(call, [kin] if kin is not None and stems else earlier)
    return Fork(
        call=call,
        reason=reason,
        seen=found.reason if found else None,
        tokens=tokens,
        messages=None if call.raw else _messages(call, kin, found, known),
        cost_tokens=0 if kin is None else _cost(call, kin, reason, known),
    )


def _cost(call: Call, kin: Call, reason: ForkReason | None, known: PlainMessages) -> int:
    """How many tokens of the call's new prompt had already been processed for `kin`."""
    above = len(call.prompt_ids) - len(call.delta_ids)
    if reason not in STARTS:
        behind = kin.sequence[min(above, shared_tokens(call.prompt_ids, kin.sequence)) :]
        return common_subsequence(call.delta_ids, behind)
    if reason is not None or call.parent is None:
        return 0
    shared = common(known.of(kin.messages), known.of(call.asked))
    if shared <= len(call.parent.messages):
        return 0
    return max(0, shared_tokens(call.prompt_ids, kin.sequence) - above)  # a branch that repeats whole messages


def _begun_with(call: Call, earlier: list[Call]) -> list[Call]:
    """The earlier calls whose prompts are prefixes of a raw prompt; all calls if there are none."""
    return [other for other in earlier if call.prompt_ids[: len(other.prompt_ids)] == other.prompt_ids] or earlier


def _kin(call: Call, earlier: list[Call], known: PlainMessages) -> tuple[Call | None, Divergence | None]:
    """The call whose conversation this one should have extended, and how its messages differ."""
    if not earlier:
        return None, None
    histories = [known.of(other.messages) for other in earlier]
    sent = known.of(call.asked)
    index = nearest(histories, sent)
    return earlier[index], compare(histories[index], sent)


def _messages(call: Call, kin: Call | None, found: Divergence | None, known: PlainMessages) -> MessageDivergence | None:
    if kin is None:
        return None
    before, now = known.of(kin.messages), known.of(call.asked)
    if found is None and root_key(kin.tools) != root_key(call.tools):
        return None  # the messages agree
    at = common(before, now) if found is None else found.index
    return MessageDivergence(
        other=kin,
        index=at,
        before=kin.messages[at] if at < len(before) else None,
        now=call.asked[at] if at < len(now) else None,
        how=change(before, now, at) if at < min(len(before), len(now)) else None,
    )
