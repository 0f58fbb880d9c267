"""The experts of a call's positions, collected over the segments of its answer.

    position   0 … start-1        start … P-1            P … P+n-2              P+n-1
               the parent's calls  own prompt positions   output, as input       the last token: not computed

An engine reports the rows of a segment with its last event, so a segment whose engine died has none. The next segment
computes the answer so far again. Which passes computed a position decides its origin:

    one pass, which reported it                     RECORDED
    several passes, and one of them reported it     RECOMPUTED: after a retract, an abort, or an engine's death
    no pass reported it                             MISSING
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.domain.experts.routed_experts import CallRouting, RoutedExperts, RoutingShape, mark_recomputed
from agentrl.engine.chunks import Chunk, unpacked_experts
from agentrl.errors import EngineError


@dataclass(slots=True)
class Report:
    """The rows of one segment, as the engine sent them: base64 of int32."""

    text: str
    first: int  # position of its first row
    again: int  # positions before this one were computed by several passes

    def read(self, shape: RoutingShape) -> RoutedExperts:
        """The rows. Raises EngineError for garbage."""
        try:
            rows = RoutedExperts.parse(unpacked_experts(self.text), shape)
        except ValueError as error:
            raise EngineError(f"the engine's routed experts cannot be recorded: {error}") from error
        mark_recomputed(rows.origins[: max(0, self.again - self.first)])
        return rows


class RoutedRows:
    """The rows of one call with a prompt of `prompt_tokens`, from position `start` on."""

    def __init__(self, shape: RoutingShape, start: int, prompt_tokens: int) -> None:
        self.start = self.end = start  # `end`: the first position without a row, from which the next segment reports
        self._shape = shape
        self._prompt_tokens = prompt_tokens
        self._computed_from: int | None = None  # before `start`, over all passes
        self._reports: list[Report] = []
        self._retractions = 0  # of the segment that runs
        self._again = 0  # positions before this one were computed again, by the segment that runs

    @property
    def size(self) -> int:
        """Bytes that `finished` reads."""
        return sum(len(report.text) for report in self._reports)

    def begin(self, tokens: int) -> None:
        """A segment begins that continues `tokens` sampled ones."""
        self._retractions = self._again = 0
        if tokens:
            self._computes_again(self._prompt_tokens + tokens - 1)

    def read(self, chunk: Chunk, tokens: int) -> None:
        """Read a chunk of the segment, after which the answer has `tokens` tokens.

        Raises EngineError for another number of rows than there are positions.
        """
        if self._computed_from is None and chunk.output_ids:
            self._computed_from = min(self.start, chunk.cached_tokens)
        if chunk.retractions > self._retractions:
            self._retractions = chunk.retractions
            # The tokens that came with this chunk may have been sampled before the retraction.
            self._computes_again(self._prompt_tokens + tokens - 1)
        if chunk.routed_experts is not None and tokens:
            self._append(chunk.routed_experts, self._prompt_tokens + tokens - 1, aborted=chunk.finish_reason == "abort")

    def _computes_again(self, end: int) -> None:
        """The positions before `end` are computed again."""
        self._computed_from, self._again = 0, end
        for report in self._reports:
            report.again = max(report.again, end)

    def _append(self, text: str, end: int, *, aborted: bool) -> None:
        """Append a report of the rows up to position `end`. It is read when the call has finished."""
        size = len(text) // 4 * 3 - text[-2:].count("=")
        if size != (end - self.end) * 4 * self._shape.layers * self._shape.top_k:
            if aborted:  # the engine may stop between a token and its report
                return
            raise EngineError(f"the engine sent {size} bytes for the experts of {end - self.end} positions")
        self._reports.append(Report(text, self.end, self._again))
        self.end = end

    def finished(self, tokens: int) -> CallRouting:
        """The routing of the call, of whose answer `tokens` tokens are kept: one row for each of its positions.

        Takes about 20 microseconds a row of 48 layers with 8 experts. Raises EngineError for garbage.
        """
        shape, count = self._shape, max(0, self._prompt_tokens + tokens - 1 - self.start)
        known = [report.read(shape) for report in self._reports]
        rest = RoutedExperts.missing(max(0, count - (self.end - self.start)), shape.layers, shape.top_k, shape.dtype)
        ids = np.concatenate([*(rows.ids for rows in known), rest.ids])[:count]
        origins = np.concatenate([*(rows.origins for rows in known), rest.origins])[:count]
        computed_from = self.start if self._computed_from is None else self._computed_from
        return CallRouting(start=self.start, computed_from=computed_from, experts=RoutedExperts(ids, origins))
