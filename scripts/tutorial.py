"""Read a tutorial of docs/tutorials as a program: files to write, commands to run, output to expect.

    ```python title="reverse.py"     a file (also yaml)
    ```bash                          commands
    ```text                          lines that the commands above it print, in this shape
    ```                              shown only

The tests play the tutorials with it, and scripts/pictures.py makes their pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One code block. `title` names the file, if it is one."""

    language: str
    title: str
    text: str


def blocks(page: str, replaced: Mapping[str, str] | None = None) -> Iterator[Block]:
    """The blocks of a page in order, with `replaced` texts. Raises ValueError for a text that the page lacks."""
    text = (FOLDER / page).read_text()
    for old, new in (replaced or {}).items():
        if old not in text:
            raise ValueError(f"{page} does not have {old!r}")
        text = text.replace(old, new)
    for language, title, body in FENCE.findall(text):
        yield Block(language, title, body)


def shape(line: str) -> str:
    """A line with `#` for every number and without extra spaces, which is the same in every run."""
    return " ".join(re.sub(r"[-+]?\d[\d.,]*", "#", line).replace("[", "[ ").split())


def missing(expected: str, printed: str) -> list[str]:
    """The lines of `expected` with a shape that no line of `printed` has."""
    shapes = {shape(line) for line in printed.splitlines()}
    return [line for line in expected.splitlines() if shape(line) not in shapes]
