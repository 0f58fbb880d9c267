"""Cases of hard replies: each makes the ids of one reply and says what must be read.

`None` for ids: the format has no place for the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.rendering.parsing.output_formats import Format

from .subjects import Call, Subject

MARK = "Qmark"  # stands for what a case splices into an argument


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be read. None does not matter."""

    calls: Sequence[Call] = ()
    content: str | None = None  # white space aside
    holds: tuple[str, ...] = field(default=())  # what content, or reasoning, must hold


Made = tuple[list[int], Expected] | None
Case = Callable[[Subject], Made]
GROUPS = (
    "white space",
    "quotes",
    "Unicode",
    "markers",
    "several",
    "text",
    "truncation",
    "types",
    "empty",
    "unclosed",
    "malformed",
)
"""In the order of the table."""
CASES: dict[str, list[tuple[str, Case]]] = {group: [] for group in GROUPS}
"""By group; whole_replies.py and broken_replies.py register them."""


def case(group: str) -> Callable[[Case], Case]:
    """Register a case."""

    def register(made: Case) -> Case:
        CASES[group].append((made.__name__.removeprefix("_").replace("_", " "), made))
        return made

    return register


def calc(text: str) -> Call:
    return "calc", {"expression": text}


def token_in_argument(subject: Subject, marker: str) -> Made:
    if subject.renderer._tokenizer.token_to_id(marker) is None or marker == '"':
        return None
    ids = spliced(subject, subject.write(calc(f"a {MARK} b")), subject.renderer._encode(marker))
    return ids, Expected([calc(f"a {marker} b")], "")


def closed(subject: Subject) -> bool:
    return isinstance(subject.reads, Format) and subject.reads.blocks.get(subject.opener) is not None


def split_stop(subject: Subject, ids: list[int]) -> tuple[str, list[int]]:
    """A reply's text, and its stop token."""
    return subject.renderer.decode(ids[:-1]), ids[-1:]


def plain_stop(subject: Subject) -> list[int]:
    """What stops a reply without a call."""
    return subject.write(text="x")[-1:]


def as_text(subject: Subject, text: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(subject.renderer._tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    for token in tokenizer.get_added_tokens_decoder().values():
        text = text.replace(token.content, "\0".join(token.content))  # added tokens that are not special
    return [id for part in text.split("\0") for id in tokenizer.encode(part, add_special_tokens=False).ids]


def spliced(subject: Subject, ids: list[int], inner: list[int]) -> list[int]:
    mark = subject.renderer._encode(MARK)
    at = next(i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)
    return ids[:at] + inner + ids[at + len(mark) :]
