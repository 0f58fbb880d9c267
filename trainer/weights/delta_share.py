"""A rank's share of the version before, in the engines' type, and the delta file that is written from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from agentrl.trainer.weights.ownership import Output
from agentrl.trainer.weights.tensor_file_layout import TYPE_NAMES
from agentrl.trainer.weights.weight_stream import Chunk, raw
from agentrl.versions.delta_writer import DeltaPart, DeltaWriter


class Previous:
    """The bytes of a rank's share, by output, in host memory."""

    def __init__(self) -> None:
        self._held: dict[Output, Tensor] = {}

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Replace the bytes of a bucket."""
        for chunk in chunks:
            self.part(chunk).copy_(torch.frombuffer(raw(chunk.data), dtype=torch.uint8))

    def part(self, chunk: Chunk) -> Tensor:
        """The held bytes that a chunk replaces."""
        whole = self._held.get(chunk.output)
        if whole is None:
            whole = self._held[chunk.output] = torch.empty(chunk.output.nbytes, dtype=torch.uint8)
        return whole[chunk.start : chunk.start + chunk.data.nbytes]

    def chunks(self, size: int) -> Iterator[list[Chunk]]:
        """All of it, in parts of at most `size` bytes."""
        for output, whole in self._held.items():
            for start in range(0, output.nbytes, size):
                yield [Chunk(output, start, whole[start : start + size])]

    def clear(self) -> None:
        """Free the memory."""
        self._held.clear()


class DeltaShare:
    """Writes a share's delta file. A context manager; `part()` is valid after the block."""

    def __init__(self, path: Path, previous: Previous) -> None:
        self._previous = previous
        self._writer = DeltaWriter(path)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Write what a bucket changes. Raises OSError."""
        for chunk in chunks:
            output = chunk.output
            if chunk.start == 0:
                self._writer.begin(output.name, TYPE_NAMES[output.dtype], output.nbytes)
            self._writer.extend(raw(self._previous.part(chunk)), raw(chunk.data))
            if chunk.start + chunk.data.nbytes == output.nbytes:
                self._writer.end()

    def part(self) -> DeltaPart:
        """The facts of the file."""
        return self._writer.part()
