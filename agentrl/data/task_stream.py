"""The tasks of a source, read in batches; and short lists of tasks, for evaluation.

files ──► rows ──► limit ──► Shape ──► (in order of difficulty) ──► JSON text, in batches of bounded size
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import orjson

from agentrl.configs.episodes.task_sources import TaskSource, sources_of
from agentrl.configs.publish_config import StorageConfig
from agentrl.data.file_rows import DAMAGED, Skip, reader_of
from agentrl.data.located_files import Files
from agentrl.data.task_shape import Measure, Shape
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.user_code import load_object

BATCH_ROWS = 8192
BATCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks as JSON text. `read`: rows of the source read so far, from its start. `last`: there are no more."""

    texts: list[str]
    read: int
    last: bool


class TaskStream:
    """One source, opened. Use it as a context manager.

    `content` identifies what is read; None for a function. Raises UserError for a source that cannot be read, naming
    `field`, file and line.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        field: str = "tasks",
        seed: int = 0,
        storage: StorageConfig = StorageConfig(),
        measure: Measure | None = None,
    ) -> None:
        self._source, self._field, self._seed = source, field, seed
        self._shape = Shape(source, field, measure)
        self._files = None if source.is_function else Files(source.path, field, storage)
        self.content: Json | None = None if self._files is None else self._files.content

    def __enter__(self) -> TaskStream:
        return self

    def __exit__(self, *_: object) -> None:
        with self._files or nullcontext():
            pass

    def batches(self, read: int = 0) -> Iterator[Batch]:
        """The tasks behind the first `read` rows, or of a source with an order behind the first `read` tasks. The last
        batch may be empty. Raises UserError.
        """
        texts: list[str] = []
        size, started = 0, read
        order = self._source.order
        for text in self._texts(read) if order is None else self._in_order(order.by)[read:]:
            read += 1
            if text is not None:
                texts.append(text.decode())
                size += len(text)
            if read - started == BATCH_ROWS or size >= BATCH_BYTES:
                yield Batch(texts, read, last=False)
                texts, size, started = [], 0, read
        yield Batch(texts, read, last=True)

    def tasks(self, limit: int) -> list[Json]:
        """At most `limit` tasks from the start."""
        return [orjson.loads(text) for text in islice((text for text in self._texts(0) if text is not None), limit)]

    def _in_order(self, field: str) -> list[bytes]:
        """All tasks, those with the smallest number first; of equal ones, those that the source has first."""
        found: list[tuple[float, int, bytes]] = []
        for number, text in enumerate(self._texts(0)):
            if text is not None:
                value = orjson.loads(text).get(field)
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise UserError(f"{self._field}: order.by: task {number + 1} has no number in its field {field!r}")
                found.append((value, number, text))
        return [text for _, _, text in sorted(found)]

    def _texts(self, read: int) -> Iterator[bytes | None]:
        """Rows as tasks, behind the first `read` rows; None for a row that is left out."""
        rows = self._of_function(read) if self._files is None else self._of_files(self._files, read)
        left = None if self._source.limit is None else max(0, self._source.limit - read)
        for name, kind, number, row in islice(rows, left):
            yield self._shape(row, partial("{} {} {}".format, name, kind, number))

    def _of_files(self, files: Files, read: int) -> Iterator[tuple[str, str, int, Any]]:
        skip = Skip(read)
        for name, path in files:
            reader = reader_of(name)
            assert reader is not None
            kind = "line" if ".jsonl" in name else "row"
            try:
                for number, row in reader(path, name, skip):
                    yield name, kind, number, row
            except DAMAGED as error:
                detail = getattr(error, "strerror", None) or error
                raise UserError(f"{self._field}: cannot read {name}: {detail}") from error
            except UserError as error:
                raise UserError(f"{self._field}: {error}") from error

    def _of_function(self, skip: int) -> Iterator[tuple[str, str, int, Any]]:
        path = self._source.path
        function = load_object(path, self._field)
        if not callable(function):
            raise UserError(f"{self._field}: {path!r} is not a function")
        found = function(**self._arguments(function))
        if not isinstance(found, Iterable):
            raise UserError(f"{self._field}: {path!r} returned {type(found).__name__}, not an iterable of mappings")
        for number, row in enumerate(found):
            if number >= skip:
                yield path, "item", number, row

    def _arguments(self, function: Callable[..., Any]) -> Json:
        """Those of the source, and the run's seed where it fits."""
        args, signature = self._source.args, inspect.signature(function)
        if "seed" in signature.parameters:
            args = {"seed": self._seed} | args
        try:
            signature.bind(**args)
        except TypeError as error:
            raise UserError(
                f"{self._field}: {self._source.path!r} does not take the arguments in `args`: {error}"
            ) from error
        return args


def load_tasks(
    tasks: Any,
    *,
    seed: int = 0,
    limit: int,
    field: str = "tasks",
    storage: StorageConfig = StorageConfig(),
    measure: Measure | None = None,
) -> dict[str, list[Json]]:
    """The first `limit` tasks of each source of a configuration, by the source's name. Raises UserError."""
    found: dict[str, list[Json]] = {}
    for source in sources_of(tasks):
        with TaskStream(source, field=field, seed=seed, storage=storage, measure=measure) as stream:
            found[source.label] = stream.tasks(limit)
        if not found[source.label]:
            raise UserError(f"{field}: {source.path!r} yields no task")
    return found
