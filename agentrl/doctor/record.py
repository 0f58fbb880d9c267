"""A session as the doctor sees it: calls in order, each with its conversation and its whole token sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentrl.domain.schemas import GREEDY_BELOW, InteractionStatus, Json, Role
from agentrl.visible import visible

COMMAND = "doctor"
"""Where a session's metadata has the command that the doctor ran."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One model call. A call that was not delivered has no tokens and no conversation."""

    number: int  # from 1, in the order they were made
    id: str
    parent: Call | None
    role: str
    dialect: str
    status: str
    reason: str | None  # why it forks, as recorded
    finish: str | None
    error: str | None
    temperature: float
    modified: bool  # sampled from another distribution than the policy's
    retry: int  # how often the client's SDK had sent it before
    digest: str
    choice: int | None  # which answer of a request for several
    delta_ids: list[int] = field(default_factory=list)  # of the prompt, behind the parent's sequence
    output_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0  # as counted at the commit
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)  # [version, start, end)
    system: list[Json] = field(default_factory=list)
    turns: list[Json] = field(default_factory=list)  # what follows the system messages, the answer last
    tools: list[Json] | None = None
    replaced: Json = field(default_factory=dict)  # sampling parameters that were asked for and not used
    used: Json = field(default_factory=dict)  # those that were
    client: str | None = None  # what the client called itself
    left_out: list[str] = field(default_factory=list)  # tools of the request that are not in the prompt

    @property
    def delivered(self) -> bool:
        """Whether its answer reached the client, and the policy gave it: such calls form the tree."""
        return self.status == InteractionStatus.COMPLETE and self.role != Role.UPSTREAM

    @property
    def greedy(self) -> bool:
        """Whether the engine took the likeliest token each time."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def prompt_ids(self) -> list[int]:
        """The whole prompt."""
        above = list(self.parent.path) if self.parent else []
        return [token for call in reversed(above) for token in call.own_ids] + self.delta_ids

    @cached_property
    def sequence(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def own_ids(self) -> list[int]:
        """What it adds to its parent's sequence."""
        return self.delta_ids + self.output_ids

    @property
    def path(self) -> Iterator[Call]:
        """Itself and what it extends, up to the root."""
        node: Call | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def messages(self) -> list[Json]:
        """Its conversation, the answer last."""
        return [*self.system, *self.turns]

    @property
    def raw(self) -> bool:
        """Whether its prompt is raw: a text or tokens without roles, of Completions."""
        return any(message["role"] == "raw" for message in self.asked)

    @property
    def asked(self) -> list[Json]:
        """Its conversation without the answer."""
        return self.messages[:-1]

    @property
    def versions(self) -> list[int]:
        """The weight versions that sampled it, in order."""
        return list(dict.fromkeys(version for version, _, _ in self.spans))


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session and its calls, oldest first. `rewards` count from whoever gave them."""

    id: str
    parent_id: str | None  # of the session whose sub-agent it is
    name: str | None  # of a sub-agent that has named itself
    status: str
    is_eval: bool
    error: str | None
    rewards: list[Json]
    calls: list[Call]
    subagents: list[Session] = field(default_factory=list)
    refusals: list[Json] = field(default_factory=list)  # calls that were refused before they began
    command: str | None = None  # that the doctor ran

    @property
    def title(self) -> str:
        """What it is called."""
        if self.parent_id is None:
            return f"session {self.id}"
        return f"sub-agent {self.id if self.name is None else visible(self.name)}"

    @property
    def delivered(self) -> list[Call]:
        """The calls that form the token tree."""
        return [call for call in self.calls if call.delivered]

    @cached_property
    def children(self) -> dict[int, list[Call]]:
        """Delivered calls by the number of the call that they extend; 0 for the roots."""
        found: dict[int, list[Call]] = {}
        for call in self.delivered:
            found.setdefault(call.parent.number if call.parent else 0, []).append(call)
        return found

    @property
    def leaves(self) -> list[Call]:
        """The calls that nothing extends: one trajectory each."""
        return [call for call in self.delivered if call.number not in self.children]


def read(
    summary: Json, trace: Sequence[Json], refusals: Sequence[Json] = (), subagents: Sequence[Session] = ()
) -> Session:
    """A session from its summary and calls, as `GET /sessions/{id}/trace` has them, and from `…/refusals`."""
    calls: dict[str, Call] = {}
    for number, item in enumerate(trace, start=1):
        parent = calls[item["parent_id"]] if item["parent_id"] else None
        calls[item["id"]] = _call(number, item, parent)
    return Session(
        id=summary["session_id"],
        parent_id=summary["parent_session_id"],
        name=summary["metadata"].get("name"),
        status=summary["status"],
        is_eval=summary["is_eval"],
        error=summary["error"],
        rewards=summary["rewards"],
        calls=list(calls.values()),
        refusals=list(refusals),
        subagents=list(subagents),
        command=summary["metadata"].get(COMMAND),
    )


def _call(number: int, item: Json, parent: Call | None) -> Call:
    options = item["options"] or {}
    facts: dict[str, Any] = {}
    if "output_ids" in item:
        facts = {
            "delta_ids": item["prompt_delta_ids"],
            "output_ids": item["output_ids"],
            "logprobs": item["logprobs"],
            "spans": item["version_spans"],
            "turns": [*(parent.turns if parent else []), *item["new_messages"], item["answer"]],
        }
    return Call(
        number=number,
        id=item["id"],
        parent=parent,
        role=item["role"],
        dialect=item["dialect"],
        status=item["status"],
        reason=item["fork_reason"],
        finish=item["finish_reason"],
        error=item["error"],
        temperature=float(item["params"].get("temperature", 1.0)),
        modified=item["distribution_modified"],
        retry=options.get("retry", 0),
        digest=item["digest"],
        choice=options.get("choice"),
        prompt_tokens=item["prompt_tokens"],
        output_tokens=item["output_tokens"],
        system=item["system"],
        tools=item["tools"],
        left_out=options.get("left_out", []),
        replaced=options.get("replaced", {}),
        used=item["params"],
        client=options.get("client"),
        **facts,
    )
