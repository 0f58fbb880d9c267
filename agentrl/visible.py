"""Escapes control characters in untrusted text before it is printed or logged.

Field names, paths, messages, reward names and engines' errors are untrusted. An escape sequence in one of them could
move the operator's cursor, change the window's title or fill the clipboard. Output goes through `say`, the console of
`agentrl.console` or `LogFormatter`, which all call `visible`. rich removes five control characters and keeps escape
sequences.
"""

from __future__ import annotations

import logging
import re
import sys

LINES = "\n\t"
"""Control characters that multi-line text keeps."""
_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")


def visible(text: str, keep: str = "") -> str:
    """Replace each non-printable character of `text`, except those in `keep`, with its escape.

    `str.isprintable` decides. Control characters, bidirectional overrides, zero-width characters, lone surrogates and
    separators other than the space are non-printable.
    """
    return _NOT_ASCII_PRINTABLE.sub(lambda found: _spelled(found[0], keep), text)


def _spelled(character: str, keep: str) -> str:
    return character if character.isprintable() or character in keep else repr(character)[1:-1]


def say(text: object, *, err: bool = False) -> None:
    """Print text on stdout or stderr."""
    print(visible(str(text), LINES), file=sys.stderr if err else sys.stdout, flush=True)


class LogFormatter(logging.Formatter):
    """Formats a record with its message on one line, followed by its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record), "\t")

    def formatException(self, ei: object) -> str:
        return visible(super().formatException(ei), LINES)  # type: ignore[arg-type]


def log_to_stderr(level: str, source: str = "") -> None:
    """Configure logging to stderr. `level` is debug, info, warning or error; `source` precedes each logger's name."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(f"%(asctime)s %(levelname)s {source}%(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)
