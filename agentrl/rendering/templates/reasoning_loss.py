"""Tells whether a chat template leaves out the reasoning of a conversation when messages follow.

alone   …<think>hm</think>  so|      the conversation by itself
whole   …  so|and?|                  the same with a message behind it: the reasoning is left out
"""

from __future__ import annotations

import re
from collections.abc import Iterator


class ReasoningLoss:
    """Compares texts of a template that writes reasoning between two markers."""

    def __init__(self, think: tuple[str, str]) -> None:
        self._start, self._end = think
        start, end = map(re.escape, think)
        self._place = re.compile(rf"(?:{start}(.*?){end})?\s*", re.DOTALL)
        self._empty = re.compile(rf"\s*(?:{start}\s*{end}\s*)?")

    def between(self, alone: str, whole: str) -> bool:
        """Whether `whole` begins with `alone`, but without some of its reasoning, which may be empty.

        White space behind reasoning may differ: some is the template's, which leaves it out too; the rest is the
        reply's, which it keeps.
        """
        at, lost = 0, False
        for text, reasoning in self._pieces(alone):
            if not whole.startswith(text, at):
                return False
            at += len(text)
            if reasoning is not None:
                place = self._place.match(whole, at)
                assert place  # the pattern matches the empty text too
                lost |= place[1] != reasoning
                at = place.end()
        return lost

    def spoken(self, turn: str) -> str:
        """A turn without the white space and the empty reasoning that it begins with."""
        return self._empty.sub("", turn, count=1)

    def _pieces(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Each text with the reasoning behind it, without the white space behind that; None behind the last one."""
        at = 0
        while (opened := text.find(self._start, at)) >= 0:
            begins = opened + len(self._start)
            if (closed := text.find(self._end, begins)) < 0:
                break
            yield text[at:opened], text[begins:closed]
            at = closed + len(self._end)
            while text[at : at + 1].isspace():
                at += 1
        yield text[at:], None
