"""A recorded session for the doctor: its calls in order, each with its conversation and its token sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentrl.domain.schemas import GREEDY_BELOW, InteractionStatus, Json, Role
from agentrl.visible import visible

COMMAND = "doctor"
"""The key in a session's metadata of the command that the doctor ran."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A model call. A call that was not delivered has no tokens and no conversation."""

    number: int  # from 1, in order
    id: str
    parent: Call | None
    role: str
    dialect: str
    status: str
    reason: str | None  # the recorded fork reason
    finish: str | None
    error: str | None
    temperature: float
    modified: bool  # sampled from a modified distribution
    retry: int  # number of earlier attempts by the client's SDK
    digest: str
    choice: int | None  # index of the answer, for requests with several
    delta_ids: list[int] = field(default_factory=list)  # prompt tokens after the parent's sequence
    output_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0  # as counted when the call was recorded
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)  # [version, start, end)
    system: list[Json] = field(default_factory=list)
    turns: list[Json] = field(default_factory=list)  # messages after the system messages, ending with the answer
    tools: list[Json] | None = None
    replaced: Json = field(default_factory=dict)  # requested sampling parameters that were replaced
    used: Json = field(default_factory=dict)  # sampling parameters that were used
    client: str | None = None  # the client's User-Agent
    left_out: list[str] = field(default_factory=list)  # tools of the request that the prompt leaves out

    @property
    def delivered(self) -> bool:
        """Whether the policy's answer reached the client. Delivered calls form the token tree."""
        return self.status == InteractionStatus.COMPLETE and self.role != Role.UPSTREAM

    @property
    def greedy(self) -> bool:
        """Whether the engine took the most likely token each time."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def prompt_ids(self) -> list[int]:
        """The full prompt."""
        above = list(self.parent.path) if self.parent else []
        return [token for call in reversed(above) for token in call.own_ids] + self.delta_ids

    @cached_property
    def sequence(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def own_ids(self) -> list[int]:
        """The tokens that the call adds to its parent's sequence."""
        return self.delta_ids + self.output_ids

    @property
    def path(self) -> Iterator[Call]:
        """The call and its ancestors, up to the root."""
        node: Call | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def messages(self) -> list[Json]:
        """The conversation, ending with the answer."""
        return [*self.system, *self.turns]

    @property
    def raw(self) -> bool:
        """Whether the prompt is raw: text or tokens without roles, from Completions."""
        return any(message["role"] == "raw" for message in self.asked)

    @property
    def asked(self) -> list[Json]:
        """The conversation without the answer."""
        return self.messages[:-1]

    @property
    def versions(self) -> list[int]:
        """The weight versions that sampled the output, in order."""
        return list(dict.fromkeys(version for version, _, _ in self.spans))


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session and its calls, oldest first."""

    id: str
    parent_id: str | None  # the parent session, for a sub-agent
    name: str | None  # the name that a sub-agent gave itself
    status: str
    is_eval: bool
    error: str | None
    rewards: list[Json]
    calls: list[Call]
    subagents: list[Session] = field(default_factory=list)
    refusals: list[Json] = field(default_factory=list)  # calls rejected before sampling
    command: str | None = None  # the command that the doctor ran

    @property
    def title(self) -> str:
        """The session's title in reports."""
        if self.parent_id is None:
            return f"session {self.id}"
        return f"sub-agent {self.id if self.name is None else visible(self.name)}"

    @property
    def delivered(self) -> list[Call]:
        """The calls that form the token tree."""
        return [call for call in self.calls if call.delivered]

    @cached_property
    def children(self) -> dict[int, list[Call]]:
        """Delivered calls by their parent's number; 0 for roots."""
        found: dict[int, list[Call]] = {}
        for call in self.delivered:
            found.setdefault(call.parent.number if call.parent else 0, []).append(call)
        return found

    @property
    def leaves(self) -> list[Call]:
        """The calls without children; each ends a trajectory."""
        return [call for call in self.delivered if call.number not in self.children]


def read(
    summary: Json, trace: Sequence[Json], refusals: Sequence[Json] = (), subagents: Sequence[Session] = ()
) -> Session:
    """Build a session from its summary and calls (`GET /sessions/{id}/trace`) and its refusals (`…/refusals`)."""
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
