"""The facts that the fork rules ask for: what a call's conversation shares with the session's recorded ones. Pure.

Messages are compared in canonical form (`rendering.divergence.plain`). A fact is computed when a rule asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from agentrl.domain.schemas import ForkReason, Json, Role
from agentrl.rendering.conversation import root_key
from agentrl.rendering.divergence import (
    PlainMessages,
    common,
    compare,
    fingerprint,
    leading_system,
    mark,
    nearest,
    plain,
    quoting,
)
from agentrl.store.calls.conversations import Conversation


class Evidence:
    """One call, and the session's conversations, oldest first.

    `recorded` conversations have an answer. Those `under_way` have none yet: only their role, system prompt and tools
    are known.
    """

    def __init__(
        self,
        recorded: Sequence[Conversation],
        messages: Sequence[Json],
        tools: Sequence[Json] | None,
        under_way: Sequence[Conversation],
    ) -> None:
        self.recorded = recorded
        self.tools = tools
        self.begun = [*recorded, *under_way]
        self.sent = plain(messages)
        self.n_system = leading_system(messages)
        self._known = PlainMessages()
        self._tools_key = root_key(tools)

    # -- the whole session -----------------------------------------------------------------------------------------

    @cached_property
    def repeated(self) -> Conversation | None:
        """The call that had exactly this prompt: a retry, or a parallel sample."""
        histories = zip(self.recorded, self._histories, strict=True)
        return next((one for one, history in histories if history[:-1] == self.sent and self._has_tools(one)), None)

    @cached_property
    def main(self) -> list[Conversation]:
        """The calls of the main agent."""
        return [one for one in self.begun if one.role == Role.MAIN]

    @cached_property
    def of_this_agent(self) -> list[Conversation]:
        """The calls with the same tools and system prompt, numbers and dates aside."""
        return [one for one in self.begun if self._has_tools(one) and self._has_system_prompt(one)]

    @property
    def is_first_with_tools(self) -> bool:
        """Whether this call has tools and no main call has any."""
        return bool(self.tools) and not any(one.tools for one in self.main)

    @property
    def has_main_system_prompt(self) -> bool:
        """Whether a main call with tools has the same system prompt."""
        return any(self._has_system_prompt(one) for one in self.main if one.tools)

    # -- the nearest recorded conversation -------------------------------------------------------------------------

    @cached_property
    def kin(self) -> Conversation:
        """The recorded conversation that shares most with the call. `recorded` must not be empty."""
        return self.recorded[self._kin_index]

    @cached_property
    def kin_history(self) -> list[Json]:
        """All messages of `kin`, its answer last."""
        return self._histories[self._kin_index]

    @cached_property
    def n_common(self) -> int:
        """How many messages `kin` and the call have in common at their beginning."""
        return common(self.kin_history, self.sent)

    @property
    def has_kin_tools(self) -> bool:
        """Whether `kin` and the call have the same tools."""
        return self._has_tools(self.kin)

    @property
    def has_kin_system_prompt(self) -> bool:
        """Whether `kin` begins with the same system messages, word for word."""
        return self.kin_history[: len(self.kin.system)] == self.sent[: self.n_system]

    @property
    def has_kin_turns(self) -> bool:
        """Whether the turns after the system messages continue those of `kin`, or repeat them."""
        return compare(self.kin_history[len(self.kin.system) :], self.sent[self.n_system :]) is None

    @property
    def repeats_an_answer_of_kin(self) -> bool:
        """Whether the messages in common include an answer."""
        return any(message["role"] == "assistant" for message in self.sent[: self.n_common])

    @cached_property
    def difference(self) -> ForkReason | None:
        """The fork reason that the first different message of `kin` gives; None when no message differs."""
        found = compare(self.kin_history, self.sent)
        return None if found is None else found.reason

    @cached_property
    def descends_from_kin(self) -> bool:
        """Whether the call continues `kin` in another way. If not, it starts a conversation of its own.

        True when the call repeats a recorded answer or a whole recorded conversation. Also true when it departs from
        `kin` after the system messages, and an answer is at that place or later in the call.
        """
        rest = self.sent[self.n_common :]
        answers = {mark(history[-1]) for history in self._histories}
        if any(message["role"] == "assistant" and mark(message) in answers for message in rest):
            return True
        if any(self._begins_with(history) for history in self._histories):
            return True
        if self.n_common <= self.n_system:
            return False
        if not rest:
            return not self.has_kin_tools
        kin_rest = self.kin_history[self.n_common :]
        return any(message["role"] == "assistant" for message in chain(rest, kin_rest[:1]))

    # -- summaries -------------------------------------------------------------------------------------------------

    @cached_property
    def quoted_summary(self) -> Conversation | None:
        """The latest quoted answer that is a summary of other calls."""
        return next((one for one in reversed(self._quoted) if is_summary(one, self.recorded, self._known)), None)

    @property
    def continues_quoted_turns(self) -> bool:
        """Whether the call continues a conversation that it quotes.

        True when the call quotes several answers of that conversation, or one answer and the task.
        """
        return any(self._continues(one) for one in self._quoted)

    @cached_property
    def _quoted(self) -> list[Conversation]:
        """The conversations whose answers the call quotes.

        The main agent may quote any agent, since others write summaries for it. For a sub-agent or a check only quotes
        of its own calls count: a quote of another agent does not show that its own history was dropped.
        """
        is_main = not self.main or any(one.role == Role.MAIN for one in self.of_this_agent)
        quotable = self.recorded if is_main else self.of_this_agent
        return quoted(quotable, self.sent[self.n_system :], self._known)

    def _continues(self, one: Conversation) -> bool:
        history = [mark(message) for message in self._known.of(one.messages)]
        answers = {mark(message) for other in self._quoted for message in self._known.of(other.messages[-1:])}
        return len(answers.intersection(history)) > 1 or history[0] in map(mark, self.sent[self.n_system :])

    # -- helpers ---------------------------------------------------------------------------------------------------

    @cached_property
    def _histories(self) -> list[list[Json]]:
        return [self._known.of(one.all) for one in self.recorded]

    @cached_property
    def _kin_index(self) -> int:
        return nearest(self._histories, self.sent)

    @cached_property
    def _tools_keys(self) -> dict[int, bytes]:
        """The keys of the tools, by the identity of their list: conversations share lists."""
        distinct = {id(one.tools): one.tools for one in self.begun}
        return {identity: root_key(tools) for identity, tools in distinct.items()}

    @cached_property
    def _fingerprints(self) -> dict[int, list[str]]:
        """The fingerprints of the system messages, by the identity of their list."""
        distinct = {id(one.system): one.system for one in self.begun}
        return {identity: fingerprint(self._known.of(system)) for identity, system in distinct.items()}

    @cached_property
    def _fingerprint(self) -> list[str]:
        return fingerprint(self.sent[: self.n_system])

    def _has_tools(self, one: Conversation) -> bool:
        return self._tools_keys[id(one.tools)] == self._tools_key

    def _has_system_prompt(self, one: Conversation) -> bool:
        return self._fingerprints[id(one.system)] == self._fingerprint

    def _begins_with(self, history: Sequence[Json]) -> bool:
        n = len(history)
        return n <= self.n_common and list(history) == list(self.sent[:n])


def quoted(recorded: Sequence[Conversation], sent: Sequence[Json], known: PlainMessages) -> list[Conversation]:
    """The conversations whose last answers the plain messages `sent` quote."""
    return [one for one in recorded if quoting(known.of(one.messages[-1:]), sent) is not None]


def is_summary(one: Conversation, recorded: Sequence[Conversation], known: PlainMessages) -> bool:
    """Whether an answer is a summary: a user asked for it after earlier answers, or in a message that quotes some."""
    *asked, _ = known.of(one.messages)
    if not asked or asked[-1]["role"] != "user":
        return False
    if any(message["role"] == "assistant" for message in asked):
        return True
    return bool(quoted([other for other in recorded if other is not one], asked, known))
