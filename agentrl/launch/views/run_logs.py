"""The logs of a run's processes, in one stream: `runs/NAME/logs/PART.log`, written on every host of the run."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentrl.errors import UserError
from agentrl.files import last_lines

POLL_S = 0.5
READ_BYTES = 1 << 20
LONGEST_LINE = 2000
"""Characters of a line that are shown."""


def chosen(folder: Path, parts: Sequence[str]) -> list[str]:
    """The parts whose logs to show: those named, a name without its rank for all ranks; all without names.

    Raises UserError with the nearest name for a part without a log.
    """
    known = sorted(path.stem for path in folder.glob("*.log"))
    if not parts:
        return known
    found = [name for name in known if any(name == part or name.rpartition("-")[0] == part for part in parts)]
    for part in parts:
        if not any(name == part or name.rpartition("-")[0] == part for name in known):
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known) or 'none'}"
            raise UserError(f"no log of {part!r} in {folder}{hint}")
    return found


def newest(folder: Path, parts: Sequence[str], lines: int) -> Iterator[tuple[str, str]]:
    """The last lines of each part's log: pairs of part and line."""
    for part in parts:
        for line in last_lines(folder / f"{part}.log", lines):
            yield part, line[:LONGEST_LINE]


def follow(
    folder: Path, names: Callable[[], Sequence[str]], stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, str]]:
    """New lines of the logs as they are written, also of parts that start later, until `stop` says so.

    Starts at the logs' present ends; a log that appears later is read from its beginning.
    """
    places = {name: _size(folder / f"{name}.log") for name in names()}
    rests: dict[str, bytes] = {}
    while True:
        idle = True
        for name in names():
            path, place = folder / f"{name}.log", places.get(name, 0)
            if _size(path) <= place:
                continue
            with path.open("rb") as file:
                file.seek(place)
                read = file.read(READ_BYTES)
            places[name], idle = place + len(read), False
            *lines, rests[name] = (rests.get(name, b"") + read).split(b"\n")
            rests[name] = rests[name][-READ_BYTES:]
            for line in lines:
                yield name, line.decode(errors="replace")[:LONGEST_LINE]
        if idle:
            if stop():
                return
            time.sleep(POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
