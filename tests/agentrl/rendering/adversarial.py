"""Hard replies for every format: what a model may write, and the only honest reading of it.

`python -m tests.agentrl.rendering.adversarial` prints the table of docs/rendering.md.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import ForkReason
from agentrl.rendering import ParsedOutput

from . import broken_replies, whole_replies  # noqa: F401 - they register the cases
from .outputs import check_splits, delivered, follow_up, parse
from .reply_cases import CASES, Expected
from .subjects import QUESTION, SUBJECTS, TOOLS, Subject, load_subject

SPLITS = 2


def check(subject: Subject, made: tuple[list[int], Expected]) -> str:
    """Why a case fails, "" where it passes."""
    ids, expected = made
    prompt = subject.prompt
    parsed, _ = parse(subject.renderer, TOOLS, prompt, ids)
    found = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    if not _equal(found, expected.calls):
        return f"calls {found}"
    if expected.content is not None and (parsed.content or "").split() != expected.content.split():
        return f"content {parsed.content!r}"
    said = f"{parsed.content}{parsed.reasoning}"
    if missing := [text for text in expected.holds if text not in said]:
        return f"{missing} is lost"
    one_id = len({call.id for call in parsed.tool_calls}) < len(parsed.tool_calls)
    if one_id and subject.reads.name != "kimi":  # whose ids are the model's own
        return "two calls have one id"
    cuts = random.Random(len(ids))
    for _ in range(SPLITS):
        check_splits(subject.renderer, TOOLS, prompt, ids, [cuts.randrange(len(ids) + 1) for _ in range(4)])
    return _cut_short(subject, ids, expected) or _round_trip(subject, parsed, ids)


def _cut_short(subject: Subject, ids: list[int], expected: Expected) -> str:
    """A reply that is cut off has a call only where the whole one has it."""
    for end in range(1, len(ids), max(1, len(ids) // 25)):
        parsed, _ = parse(subject.renderer, TOOLS, subject.prompt, ids[:end])
        found = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
        if not _equal(found, list(expected.calls)[: len(found)]):
            return f"cut at {end}: calls {found}"
    return ""


def _round_trip(subject: Subject, parsed: ParsedOutput, ids: list[int]) -> str:
    """The client sends back what it got: the next prompt begins with the recorded tokens, or reasoning was dropped."""
    if not subject.ends(ids):
        return ""
    previous = subject.prompt + ids
    before = [*QUESTION, delivered(parsed, with_reasoning=True)]
    bridge = subject.renderer.bridge(previous, follow_up(parsed, "more"), TOOLS, messages_before=before)
    if bridge.delta_ids is None and bridge.reason is not ForkReason.REASONING_DROPPED:
        return f"the next turn forks: {bridge.reason}"
    if bridge.delta_ids is not None and "more" not in subject.renderer.decode(bridge.delta_ids):
        return "the next turn is not rendered"
    return ""


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Equal values of equal types."""
    return json.dumps(list(found), sort_keys=True) == json.dumps(list(expected), sort_keys=True)


KNOWN = {
    ("qwen3.5 (no thinking)", "end of reasoning as a token in an argument"),
    ("qwen3.5 (no thinking)", "reasoning that a call ends"),
}
"""Cases that fail: the reply is read, but its template writes it otherwise, so that the next turn forks. It takes
`</think>` in a text for the end of reasoning, and opens none of its own."""


Result = tuple[str, str, str | None]


def results(subject: Subject) -> Iterator[Result]:
    """Group, name, and why a case fails: "" where it passes, None where the format has no place for it."""
    for group, cases in CASES.items():
        for name, made in cases:
            found = made(subject)
            yield group, name, None if found is None else check(subject, found)


def row(name: str, format: str, found: Sequence[Result]) -> str:
    """A line of the table."""
    by_group: dict[str, list[str | None]] = {}
    for group, _, why in found:
        by_group.setdefault(group, []).append(why)
    return f"| {name} | {format} | {' | '.join(map(_cell, by_group.values()))} |"


def _cell(found: list[str | None]) -> str:
    run = [why for why in found if why is not None]
    return f"{sum(not why for why in run)}/{len(run)}" if run else "–"


def head() -> str:
    """The first lines of the table."""
    columns = ["family or template", "format", *CASES]
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def table() -> str:
    """Cases passed of those that a format has a place for, by group."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(SUBJECTS):
            subject = load_subject(Path(folder) / str(i), name)
            rows.append(row(name, subject.reads.name, list(results(subject))))
    return "\n".join([head(), *rows])


if __name__ == "__main__":
    print(table())
