"""The console that commands print to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from agentrl.visible import LINES, visible

NEVER_WRAPS = 100_000


class Console(rich.console.Console):  # noqa: TID251
    """Rich's console for untrusted text: markup is off, and control characters are escaped.

    Styles come from `rich.text.Text` and `style=`. Rich's own control segments (cursor, clearing) pass through.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False, "highlight": False} | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text, LINES), segment.style)


def report_console() -> Console:
    """A console that wraps lines only on a terminal, or where COLUMNS says how long they may be."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = NEVER_WRAPS
    return console
