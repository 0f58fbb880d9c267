"""Rows of JSONL, CSV, Parquet and Arrow files, in constant memory. Numbers of lines and rows begin at 1."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from agentrl.errors import UserError

Numbered = Iterator[tuple[int, Any]]


@dataclass(slots=True)
class Skip:
    """How many rows are still to be passed over. Readers count it down, file by file."""

    left: int


Reader = Callable[[Path, str, Skip], Numbered]
"""Reads a file, which errors call by a name; yields the rows with their numbers."""
MAX_LINE_BYTES = 4 * 1024 * 1024
BUFFER_BYTES = 1024 * 1024
"""Bytes of a column that are read at a time. Memory-mapped files would count as memory of the process."""
TOGETHER = 1024
"""Rows of a Parquet file that are decoded together."""


def jsonl_rows(path: Path, name: str, skip: Skip) -> Numbered:
    """The lines of a JSONL file that are not empty. A skipped line is not parsed."""
    with _bytes_of(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{name} line {number} is longer than {MAX_LINE_BYTES} bytes")
            if line.isspace():
                continue
            if skip.left:
                skip.left -= 1
                continue
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UserError(f"{name} line {number} is not JSON: {error}") from error


def csv_rows(path: Path, name: str, skip: Skip) -> Numbered:
    """The rows of a CSV file below its header line. All values are text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    number = 1
    with _bytes_of(path) as file:
        try:
            rows = csv.DictReader(_lines(file, name), strict=True)
            for number, row in enumerate(rows, start=2):
                if None in row or None in row.values():
                    raise UserError(
                        f"{name} row {number} has {'more' if None in row else 'fewer'} values than its header"
                    )
                if skip.left:
                    skip.left -= 1
                else:
                    yield number, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{name} row {number + 1} is not CSV: {error}") from error


def parquet_rows(path: Path, name: str, skip: Skip) -> Numbered:
    """The rows of a Parquet file. Whole row groups are skipped without being read."""
    pa, parquet = _pyarrow(name)
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            first = group = 0
            while group < len(sizes) and sizes[group] <= skip.left:
                first += sizes[group]
                skip.left -= sizes[group]
                group += 1
            yield from _batch_rows(file.iter_batches(TOGETHER, row_groups=range(group, len(sizes))), first, skip)
    except pa.ArrowException as error:
        raise UserError(f"{name} cannot be read as Parquet: {' '.join(str(error).split())}") from error


def arrow_rows(path: Path, name: str, skip: Skip) -> Numbered:
    """The rows of an Arrow stream, as `datasets.save_to_disk` writes it."""
    pa, _ = _pyarrow(name)
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
            yield from _batch_rows(stream, 0, skip)
    except pa.ArrowException as error:
        raise UserError(f"{name} cannot be read as Arrow: {' '.join(str(error).split())}") from error


def _batch_rows(batches: Any, first: int, skip: Skip) -> Numbered:
    for batch in batches:
        start = min(skip.left, batch.num_rows)
        skip.left -= start
        for begin in range(start, batch.num_rows, TOGETHER):
            yield from enumerate(batch.slice(begin, TOGETHER).to_pylist(), start=first + begin + 1)
        first += batch.num_rows


READERS: dict[str, Reader] = {
    ".jsonl": jsonl_rows,
    ".jsonl.gz": jsonl_rows,
    ".csv": csv_rows,
    ".csv.gz": csv_rows,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
"""The reader of each suffix."""


def reader_of(name: str) -> Reader | None:
    """The reader of a file, by the suffix of its name."""
    return next((reader for suffix, reader in READERS.items() if name.lower().endswith(suffix)), None)


def _bytes_of(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if zipped else path.open("rb")  # type: ignore[return-value]


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    first = True
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{name} has a line of more than {MAX_LINE_BYTES} bytes")
        yield line.decode("utf-8-sig" if first else "utf-8")
        first = False


def _pyarrow(name: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{name} needs pyarrow: pip install 'agentrl[data]'") from error
    return pyarrow, pyarrow.parquet


DAMAGED = (OSError, EOFError, zlib.error)
"""The errors of reading a file: `gzip` reports damage by the last two."""
