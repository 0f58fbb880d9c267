"""Why a call starts a new branch of the session's token tree, and the role of the call: an ordered table of rules.

`judge` takes the first rule of RULES that holds. The call's conversation is compared with the session's recorded ones
(`fork_evidence`). Calls may begin side by side: the role, system prompt and tools of a call that is still running are
known, its answer is not.

`judge_branch` is for a call that extends a recorded one, but not the deepest one with the same messages.
`raw_place` is for raw prompts, which have no messages: their beginning is compared.

A role in the header `X-Turn-Type` replaces the role found here, and a call that extends another has its role. When the
session has ended, the calls before the agent with tools are judged again (`store.sessions.roles`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from agentrl.domain.schemas import ForkReason, Json, Role
from agentrl.proxy.calls.prompts.fork_evidence import Evidence, is_summary, quoted
from agentrl.proxy.calls.token_tree import Decode, Tree
from agentrl.rendering.divergence import PlainMessages, common, compare, mark, nearest, plain
from agentrl.store.calls.conversations import Conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a call in its session."""

    role: Role
    reason: ForkReason | None
    summary: str | None = None  # the call that wrote the summary at the start of the conversation


@dataclass(frozen=True, slots=True)
class Rule:
    """When `holds` is true the call has this role and reason, unless an earlier rule holds."""

    holds: Callable[[Evidence], bool]
    role: Callable[[Evidence], Role]
    reason: ForkReason | Callable[[Evidence], ForkReason] | None
    names_summary: bool = False


FIRST = Place(role=Role.MAIN, reason=None)


def judge(
    recorded: Sequence[Conversation],
    messages: Sequence[Json],
    tools: Sequence[Json] | None,
    under_way: Sequence[Conversation] = (),
) -> Place:
    """The place of a call that extends no recorded one.

    `recorded` holds the session's conversations, `under_way` those without an answer yet, both oldest first.
    """
    evidence = Evidence(recorded, messages, tools, under_way)
    rule = deciding_rule(evidence)
    summary = evidence.quoted_summary if rule.names_summary else None
    return Place(
        role=rule.role(evidence),
        reason=rule.reason(evidence) if callable(rule.reason) else rule.reason,
        summary=None if summary is None else summary.call_id,
    )


def deciding_rule(evidence: Evidence) -> Rule:
    """The first rule that holds."""
    return next(rule for rule in RULES if rule.holds(evidence))


def judge_branch(
    recorded: Sequence[Conversation], messages: Sequence[Json], covered: int, below: Collection[str]
) -> ForkReason | None:
    """Why a call extends the recorded call of its first `covered` messages, and none of the calls `below` that one.

    The call is compared with the one below that shares most messages. None: the call only asks something else.
    """
    known = PlainMessages()
    sent = plain(messages)[covered:]
    others = [one for one in recorded if one.call_id in below]
    histories = [known.of(one.all) for one in others]
    if histories:
        index = nearest([history[covered:] for history in histories], sent)
        before, history = histories[index][:covered], histories[index][covered:]
        at = common(history, sent)
        if at == len(history) and at < len(sent):  # it repeats every message, but not the tokens
            return ForkReason.TRUNCATED if others[index].finish == "length" else ForkReason.TEMPLATE_REWROTE
        if any(message["role"] == "assistant" for message in sent):
            found = compare([*before, *history], [*before, *sent])
            return None if found is None else found.reason
        later = {mark(message) for message in history[at:]}
        if any(mark(message) in later for message in sent[at:]):  # the messages between were dropped
            return ForkReason.HISTORY_EDITED
    compacted = any(one.call_id in below or is_summary(one, recorded, known) for one in quoted(recorded, sent, known))
    return ForkReason.COMPACTED if compacted else None


def raw_place(tree: Tree, prompt: str | list[int], decode: Decode, stop_ids: Sequence[int]) -> Place:
    """The place of a raw prompt that does not begin with a whole recorded call (its prompt and its answer).

    A prompt that begins with an earlier prompt has dropped or changed the answer that was sampled, or dropped the token
    that ended it. The text of an answer that was cut off before any of `stop_ids` may become other tokens: then the
    reason is `truncated`.
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


# -- predicates, in the order of RULES -----------------------------------------------------------------------------


def is_first_call(evidence: Evidence) -> bool:
    """The session has no other call."""
    return not evidence.begun


def repeats_a_prompt(evidence: Evidence) -> bool:
    """An earlier call had the same messages and tools: a retry, or a parallel sample."""
    return evidence.repeated is not None


def hands_over(evidence: Evidence) -> bool:
    """Another system prompt and other tools continue the same turns."""
    return _departs_with_other_tools(evidence) and not evidence.has_kin_system_prompt and evidence.has_kin_turns


def changes_tools(evidence: Evidence) -> bool:
    """The tools differ. The messages are the same, or differ only after an answer in common."""
    if not _departs_with_other_tools(evidence):
        return False
    return evidence.difference is None or evidence.repeats_an_answer_of_kin


def departs_from_kin(evidence: Evidence) -> bool:
    """The call is a recorded conversation that was continued in another way."""
    return bool(evidence.recorded) and evidence.descends_from_kin


def _departs_with_other_tools(evidence: Evidence) -> bool:
    return departs_from_kin(evidence) and not evidence.has_kin_tools


def is_another_agent(evidence: Evidence) -> bool:
    """The session has not had this system prompt with these tools."""
    return not evidence.of_this_agent


def begins_beside_running_calls(evidence: Evidence) -> bool:
    """No call of the session has an answer yet."""
    return not evidence.recorded


def is_compacted(evidence: Evidence) -> bool:
    """The call quotes a summary, or continues turns that it quotes."""
    return evidence.quoted_summary is not None or evidence.continues_quoted_turns


def begins_anew(evidence: Evidence) -> bool:
    """True: this rule is for every call that no earlier rule explains."""
    return True


# -- roles ---------------------------------------------------------------------------------------------------------


def main_role(evidence: Evidence) -> Role:
    """The agent itself."""
    return Role.MAIN


def role_of_the_repeated(evidence: Evidence) -> Role:
    """The role of the call with the same prompt."""
    assert evidence.repeated is not None
    return Role(evidence.repeated.role)


def role_of_kin(evidence: Evidence) -> Role:
    """The role of the conversation that the call departs from."""
    return Role(evidence.kin.role)


def role_of_another_agent(evidence: Evidence) -> Role:
    """`main` for the first agent, and for the first with tools (a title may come before it).

    `side` for a call without tools and with a system prompt of its own, beside a main agent with tools: a title, a
    check. Otherwise `subagent`.
    """
    if not evidence.main or evidence.is_first_with_tools:
        return Role.MAIN
    beside = any(one.tools for one in evidence.main) and not evidence.tools
    return Role.SIDE if beside and not evidence.has_main_system_prompt else Role.SUBAGENT


def role_of_this_agent(evidence: Evidence) -> Role:
    """The role of the calls with the same system prompt and tools; `main` when there is no main call yet."""
    alike = evidence.of_this_agent
    if not evidence.main or any(one.role == Role.MAIN for one in alike):
        return Role.MAIN
    return Role(alike[-1].role)


# -- the table -----------------------------------------------------------------------------------------------------


def first_difference(evidence: Evidence) -> ForkReason:
    """The fork reason that the first different message gives."""
    return evidence.difference or ForkReason.HISTORY_EDITED


RULES = (
    Rule(is_first_call, main_role, None),
    Rule(repeats_a_prompt, role_of_the_repeated, None),
    Rule(hands_over, role_of_kin, ForkReason.OTHER_AGENT),
    Rule(changes_tools, role_of_kin, ForkReason.TOOLS_CHANGED),
    Rule(departs_from_kin, role_of_kin, first_difference),
    Rule(is_another_agent, role_of_another_agent, ForkReason.OTHER_AGENT),
    Rule(begins_beside_running_calls, role_of_this_agent, None),
    Rule(is_compacted, role_of_this_agent, ForkReason.COMPACTED, names_summary=True),
    Rule(begins_anew, role_of_this_agent, ForkReason.NEW_CONVERSATION),
)
