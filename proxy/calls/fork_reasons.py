"""What a call is that extends no recorded one, or not the whole of one: its role, and why it forks.

Its conversation is compared with the session's recorded ones, read from the store; only forks pay for that. Of a
conversation whose first call is still running, role, system prompt and tools are known: calls may begin side by side.

- The first call of a session: `main`.
- The prompt of an earlier call once more (a retry, a parallel sample): that call's role, no reason.
- The history holds recorded answers, or stands where they stood: it is the nearest recorded conversation gone another
  way, with its role. Other tools: `tools_changed`; another system prompt and other tools: `other_agent`, a handoff;
  else what became of the first message that differs (`rendering.divergence`).
- The history holds none, under a system prompt (numbers and dates aside) and tools that the session has had: the role
  is that of the calls under them, `main` where there is no main call yet; `compacted` when it stands on earlier turns
  of theirs (the main agent: of anyone's), else `new_conversation`. It stands on them when it quotes an answer that sums
  up others, several answers of one conversation, or one and the task that it was given to. A second task that quotes
  the result of the first is new.
- Under others: `other_agent`. It is `main` where there is no main call yet, or with tools where no main call had any
  (the title came first). Without tools beside a main thread that has some, and with another system prompt, it is `side`
  (a title, a check); else `subagent`.

A call that extends a recorded one is compared with what else goes on from that: with the conversation that shares most
messages. One that only asks something else there is a branch without a reason.

Raw prompts have no messages: their place is told by what they begin with (`raw_place`).

What the caller says in `X-Turn-Type` wins over all of this, and whatever extends a call has its role. Once the session
has ended, what came before the agent with tools is judged again (`store.roles`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from agentrl.domain.schemas import ForkReason, Json, Role
from agentrl.proxy.calls.token_tree import Decode, Tree
from agentrl.proxy.dialects.dialect import ModelRequest
from agentrl.proxy.state import ProxyState
from agentrl.rendering.conversation import root_key
from agentrl.rendering.divergence import (
    common,
    compare,
    fingerprint,
    leading_system,
    mark,
    nearest,
    plain,
    quoting,
)
from agentrl.store.calls import conversations, interactions
from agentrl.store.calls.conversations import Conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a call stands in its session."""

    role: Role
    reason: ForkReason | None
    summary: str | None = None  # the call that wrote the summary which the conversation stands on


FIRST = Place(role=Role.MAIN, reason=None)


async def place(state: ProxyState, session_id: str, request: ModelRequest) -> Place:
    """The place of a call whose conversation extends no recorded one."""

    def read(conn: Connection) -> Place:
        if not conversations.any_of(conn, session_id):
            return FIRST
        recorded = list(conversations.of_session(conn, session_id).values())
        return judge(recorded, request.messages, request.tools, conversations.under_way(conn, session_id))

    found = await state.read(read)
    if found.summary is not None:
        await state.write(interactions.sums_up, found.summary)
    return found


async def why_not_deeper(
    state: ProxyState, session_id: str, request: ModelRequest, covered: int, below: Collection[str]
) -> ForkReason | None:
    """Why a call that extends a recorded one by its first `covered` messages extends none of the calls `below` that."""

    def read(conn: Connection) -> ForkReason | None:
        recorded = list(conversations.of_session(conn, session_id).values())
        return judge_branch(recorded, request.messages, covered, below)

    return await state.read(read)


def raw_place(tree: Tree, prompt: str | list[int], decode: Decode, stop_ids: Sequence[int]) -> Place:
    """The place of a raw prompt that begins with no whole call, prompt and answer.

    One that goes on from an earlier prompt leaves out the answer that was sampled, or the token that ended it, or says
    it otherwise. The text of an answer that was cut off, before any of `stop_ids`, may be other tokens.
    """
    if not tree.nodes:
        return FIRST
    kin = tree.nearest_prompt(prompt, decode)
    if kin is None:
        return Place(role=Role.MAIN, reason=ForkReason.NEW_CONVERSATION)
    node, length = kin
    if length == len(prompt):
        return Place(role=Role(node.role), reason=None)
    output = node.ids[len(node.ids) - node.n_output :]
    cut_off = bool(output) and output[-1] not in stop_ids
    again = not isinstance(prompt, str) and cut_off and decode(prompt[length:]).startswith(decode(output))
    return Place(role=Role(node.role), reason=ForkReason.TRUNCATED if again else ForkReason.HISTORY_EDITED)


def judge(
    recorded: Sequence[Conversation],
    messages: Sequence[Json],
    tools: Sequence[Json] | None,
    under_way: Sequence[Conversation] = (),
) -> Place:
    """`place`, given the session's recorded conversations and those that have no answer yet, oldest first."""
    known: dict[int, Json] = {}
    sent, histories = plain(messages), [plain(one.all, known) for one in recorded]
    tools_key, n_system = root_key(tools), leading_system(messages)
    begun = [*recorded, *under_way]
    keys = {id(one.tools): root_key(one.tools) for one in {id(one.tools): one for one in begun}.values()}
    if not begun:
        return FIRST
    for one, history in zip(recorded, histories, strict=True):
        if history[:-1] == sent and keys[id(one.tools)] == tools_key:
            return Place(role=Role(one.role), reason=None)
    if recorded:
        index = nearest(histories, sent)
        kin, history = recorded[index], histories[index]
        same_tools = keys[id(kin.tools)] == tools_key
        if _stems_from(histories, index, sent, n_system, same_tools=same_tools):
            reason = _why(kin, history, sent, n_system, same_tools=same_tools)
            return Place(role=Role(kin.role), reason=reason)
    prints = {id(one.system): fingerprint(plain(one.system, known)) for one in begun}
    own = fingerprint(sent[:n_system])
    alike = [one for one in begun if keys[id(one.tools)] == tools_key and prints[id(one.system)] == own]
    main = [one for one in begun if one.role == Role.MAIN]
    if not alike:
        strange = all(prints[id(one.system)] != own for one in main if one.tools)
        return Place(role=_role_of_stranger(main, tools, strange=strange), reason=ForkReason.OTHER_AGENT)
    own_role = Role.MAIN if not main or any(one.role == Role.MAIN for one in alike) else Role(alike[-1].role)
    if not recorded:
        return Place(role=own_role, reason=None)
    # Others sum up for the main agent; a check that quotes what it checks has lost nothing.
    quotable = recorded if own_role == Role.MAIN else alike
    quoted = _quoted(quotable, sent[n_system:], known)
    sums = [one.call_id for one in quoted if _sums_up(one, recorded, known)]
    if sums or any(_stands_on(one, quoted, sent[n_system:], known) for one in quoted):
        return Place(role=own_role, reason=ForkReason.COMPACTED, summary=sums[-1] if sums else None)
    return Place(role=own_role, reason=ForkReason.NEW_CONVERSATION)


def judge_branch(
    recorded: Sequence[Conversation], messages: Sequence[Json], covered: int, below: Collection[str]
) -> ForkReason | None:
    """`why_not_deeper`, given the session's recorded conversations. None: it just goes another way from there."""
    known: dict[int, Json] = {}
    sent = plain(messages)[covered:]
    others = [one for one in recorded if one.call_id in below]
    histories = [plain(one.all, known) for one in others]
    if histories:
        index = nearest([history[covered:] for history in histories], sent)
        before, history = histories[index][:covered], histories[index][covered:]
        at = common(history, sent)
        if at == len(history) and at < len(sent):  # every message of it, and not its tokens
            return ForkReason.TRUNCATED if others[index].finish == "length" else ForkReason.TEMPLATE_REWROTE
        if any(message["role"] == "assistant" for message in sent):
            found = compare([*before, *history], [*before, *sent])
            return None if found is None else found.reason
        later = {mark(message) for message in history[at:]}
        if any(mark(message) in later for message in sent[at:]):  # what stood between was dropped
            return ForkReason.HISTORY_EDITED
    quoted = _quoted(recorded, sent, known)
    compacted = any(one.call_id in below or _sums_up(one, recorded, known) for one in quoted)
    return ForkReason.COMPACTED if compacted else None


def _quoted(recorded: Sequence[Conversation], sent: Sequence[Json], known: dict[int, Json]) -> list[Conversation]:
    """The conversations whose last answers the plain messages quote."""
    answered = [one for one in recorded if one.messages]
    return [one for one in answered if quoting(plain([one.messages[-1]], known), sent) is not None]


def _sums_up(one: Conversation, recorded: Sequence[Conversation], known: dict[int, Json]) -> bool:
    """Whether an answer is a summary: a user asked for it behind earlier answers, or in words that quote some."""
    *asked, _ = plain(one.messages, known)
    if not asked or asked[-1]["role"] != "user":
        return False
    if any(message["role"] == "assistant" for message in asked):
        return True
    return bool(_quoted([other for other in recorded if other is not one], asked, known))


def _stands_on(one: Conversation, quoted: Sequence[Conversation], sent: Sequence[Json], known: dict[int, Json]) -> bool:
    """Whether plain messages go on with a conversation: they quote another answer of it too, or hold its task."""
    history = [mark(message) for message in plain(one.messages, known)]
    answers = {mark(known[id(other.messages[-1])]) for other in quoted}
    return len(answers.intersection(history)) > 1 or history[0] in map(mark, sent)


def _stems_from(
    histories: Sequence[Sequence[Json]], kin: int, sent: Sequence[Json], n_system: int, *, same_tools: bool
) -> bool:
    """Whether `sent` is the history `kin` gone another way, not a conversation of its own."""
    at = common(histories[kin], sent)
    answers = {mark(history[-1]) for history in histories}
    if any(message["role"] == "assistant" and mark(message) in answers for message in sent[at:]):
        return True
    if any(len(history) <= at and list(history) == list(sent[: len(history)]) for history in histories):
        return True
    if at <= n_system:
        return False
    if at == len(sent):
        return not same_tools
    follows = any(message["role"] == "assistant" for message in sent[at:])
    return follows or (at < len(histories[kin]) and histories[kin][at]["role"] == "assistant")


def _why(
    kin: Conversation, history: Sequence[Json], sent: Sequence[Json], n_system: int, *, same_tools: bool
) -> ForkReason:
    """The reason of a call whose conversation stems from `history`."""
    found = compare(history, sent)
    n_before = len(kin.system)
    other_system = history[:n_before] != sent[:n_system]
    if not same_tools:
        same_turns = compare(history[n_before:], sent[n_system:])
        if other_system and same_turns is None:
            return ForkReason.OTHER_AGENT
        at = common(history, sent)
        if found is None or any(message["role"] == "assistant" for message in sent[:at]):
            return ForkReason.TOOLS_CHANGED
    return ForkReason.HISTORY_EDITED if found is None else found.reason


def _role_of_stranger(main: Sequence[Conversation], tools: Sequence[Json] | None, *, strange: bool) -> Role:
    """The role of a conversation under a system prompt and tools that the session has not had.

    It is `strange` when no main call with tools had its system prompt.
    """
    armed = any(one.tools for one in main)
    if not main or (tools and not armed):
        return Role.MAIN
    return Role.SIDE if armed and not tools and strange else Role.SUBAGENT
