"""Untrusted text on terminals and in logs: control characters are spelled out before anything is printed.

Field names, paths, messages, reward names and engines' errors come from outside. An escape sequence in one of them
could move the operator's cursor, change the window's title or fill the clipboard. What prints goes through `say`, the
console of `agentrl.console` or `LogFormatter`; all of them call `visible`. rich alone removes five control characters,
and lets escape sequences through.
"""

from __future__ import annotations

import logging
import re
import sys

LINES = "\n\t"
"""What a text of several lines keeps."""
_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")


def visible(text: str, keep: str = "") -> str:
    """`text` with every character that is not printable written as its escape, except those in `keep`.

    `str.isprintable` decides: control characters, bidirectional overrides, zero-width characters, lone surrogates and
    other separators than the space are not printable.
    """
    return _NOT_ASCII_PRINTABLE.sub(lambda found: _spelled(found[0], keep), text)


def _spelled(character: str, keep: str) -> str:
    return character if character.isprintable() or character in keep else repr(character)[1:-1]


def say(text: object, *, err: bool = False) -> None:
    """Print lines of text on stdout, or on stderr."""
    print(visible(str(text), LINES), file=sys.stderr if err else sys.stdout, flush=True)


class LogFormatter(logging.Formatter):
    """A record's message is one line; its traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record), "\t")

    def formatException(self, ei: object) -> str:
        return visible(super().formatException(ei), LINES)  # type: ignore[arg-type]


def log_to_stderr(level: str, source: str = "") -> None:
    """Set up this process's log: `level` is debug, info, warning or error; `source` precedes each logger's name."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(f"%(asctime)s %(levelname)s {source}%(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)
