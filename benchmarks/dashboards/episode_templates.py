"""Templates of episodes: trees of calls with packed arrays, which the sessions of a generated run share.

A session of a run has about ten calls: turns with tool calls, sometimes a fork, a side call, a sub-agent's call, or a
call that failed and was repeated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.store.db import codec
from agentrl.store.db.codec import Content

from .episode_texts import SYSTEMS, TOOLS, Texts

VOCABULARY = 32_000
FORKS = {
    "reasoning_dropped": 30,
    "history_edited": 20,
    "compacted": 15,
    "template_rewrote": 12,
    "truncated": 8,
    "arguments_changed": 6,
    "tools_changed": 5,
    "call_ids_changed": 4,
}
FORKED, SIDE, SUBAGENT, CUT, UNDONE = 0.18, 0.06, 0.03, 0.04, 0.012
"""Shares: of episodes with a fork, a side call, a sub-agent; of calls that reach their limit, that have no answer."""
UNANSWERED = {"failed": 6, "aborted": 4, "lost": 1}


@dataclass(slots=True)
class TemplateCall:
    """A call of a template; `begin` and `end` are shares of the episode's duration."""

    parent: int | None
    role: str
    status: str
    fork_reason: str | None
    finish_reason: str
    begin: float
    end: float
    messages: int
    prompt_tokens: int
    output_tokens: int
    prompt_digest: str
    trainable: bool
    system: str
    tools: str | None
    data: Json  # the packed columns of its row of interaction_data

    @property
    def recorded(self) -> bool:
        """Whether it has tokens."""
        return self.status in ("complete", "aborted")


@dataclass(slots=True)
class Template:
    """An episode. A path is a list of (call, whether the path owns its output)."""

    calls: list[TemplateCall]
    paths: list[list[tuple[int, bool]]]


class _Maker:
    """Adds calls to one template."""

    def __init__(self, rng: random.Random, texts: Texts, turns: int) -> None:
        self.rng, self.texts, self.turns = rng, texts, turns
        self.calls: list[TemplateCall] = []
        self.ends: list[TokenIds] = []  # the whole sequence up to each call's end
        kind = rng.randrange(len(TOOLS))
        self.system, self.tools = SYSTEMS[kind].hash, TOOLS[kind].hash
        self.tool_names = [tool["function"]["name"] for tool in codec.unpack_json(TOOLS[kind].body or b"")]

    def add(
        self, at: int, parent: int | None, role: str = "main", fork: str | None = None, status: str = "complete"
    ) -> int:
        """Add a call as turn `at`; returns its number."""
        rng = self.rng
        before = TokenIds() if parent is None else self.ends[parent]
        delta = self._ids(rng.randint(24, 48) if parent is None else rng.randint(4, 10))
        prompt = before.extended(delta)
        output = self._ids(rng.randint(6, 20)) if status in ("complete", "aborted") else []
        last = at == self.turns - 1
        cut = rng.random() < CUT
        tool = None if last or role != "main" or cut else rng.choice(self.tool_names)
        begin = (at + rng.uniform(0.05, 0.3)) / self.turns
        new, answer = self.texts.turn(parent is None, tool)
        self.calls.append(
            TemplateCall(
                parent=parent,
                role=role,
                status=status,
                fork_reason=fork,
                finish_reason="length" if cut else "tool_calls" if tool else "stop",
                begin=begin,
                end=min((at + 1) / self.turns, begin + rng.uniform(0.2, 0.6) / self.turns),
                messages=2 if parent is None else self.calls[parent].messages + 2,
                prompt_tokens=len(prompt),
                output_tokens=len(output),
                prompt_digest=prompt.digest,
                trainable=rng.random() > 0.01,
                system=self.system,
                tools=self.tools if role == "main" else None,
                data={
                    "new_messages": new,
                    "answer": answer,
                    "prompt_delta_ids": codec.pack_ids(delta),
                    "output_ids": codec.pack_ids(output),
                    "logprobs": codec.pack_logprobs([-rng.expovariate(2.0) for _ in output]),
                    "top_logprobs": None,
                },
            )
        )
        self.ends.append(prompt.extended(output))
        return len(self.calls) - 1

    def _ids(self, n: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(n)]


def make(count: int, mean_calls: float, seed: int) -> list[Template]:
    """`count` templates with `mean_calls` calls each, on average."""
    rng = random.Random(f"{seed}/templates")
    texts = Texts(rng)
    spread = np.random.default_rng(seed).gamma(6.0, 1.0, count)
    lengths = spread / spread.mean() * (mean_calls - SIDE - SUBAGENT)
    return [_template(rng, texts, max(1, round(length))) for length in lengths]


def _template(rng: random.Random, texts: Texts, turns: int) -> Template:
    maker = _Maker(rng, texts, turns)
    forked_at = rng.randrange(1, turns) if turns > 1 and rng.random() < FORKED else None
    parent: int | None = None
    for at in range(turns):
        fork = rng.choices(list(FORKS), list(FORKS.values()))[0] if at == forked_at else None
        if rng.random() < UNDONE:
            status = rng.choices(list(UNANSWERED), list(UNANSWERED.values()))[0]
            maker.add(at, None if fork else parent, fork=fork, status=status)
        parent = maker.add(at, None if fork else parent, fork=fork)
        if at == 0 and rng.random() < SIDE:
            maker.add(at, None, role="side", fork="other_agent")
        if at == turns // 2 and rng.random() < SUBAGENT:
            maker.add(at, None, role="subagent", fork="other_agent")
    return Template(maker.calls, _paths(maker.calls))


def _paths(calls: list[TemplateCall]) -> list[list[tuple[int, bool]]]:
    """Root-to-leaf paths of the complete calls; the first path with a call owns it."""
    nodes = [i for i, call in enumerate(calls) if call.status == "complete"]
    inner = {calls[i].parent for i in nodes}
    owned: set[int] = set()
    found = []
    for leaf in (i for i in nodes if i not in inner):
        path = [leaf]
        while (above := calls[path[-1]].parent) is not None:
            path.append(above)
        path.reverse()
        found.append([(i, i not in owned) for i in path])
        owned.update(path)
    return found


def shared_contents() -> list[Content]:
    """The contents that calls refer to."""
    return [*SYSTEMS, *TOOLS]
