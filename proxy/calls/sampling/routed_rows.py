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

import numpy as np

from agentrl.domain.experts.routed_experts import (
    CallRouting,
    RoutedExperts,
    RoutingShape,
    mark_recomputed,
)
from agentrl.engine.sglang_client import Chunk
from agentrl.errors import EngineError


class RoutedRows:
    """The rows of one call with a prompt of `prompt_tokens`, from position `start` on."""

    def __init__(self, shape: RoutingShape, start: int, prompt_tokens: int) -> None:
        self.start = start
        self._shape = shape
        self._prompt_tokens = prompt_tokens
        self._computed_from: int | None = None  # before `start`, over all passes
        self._ids = np.zeros((0, shape.layers, shape.top_k), shape.dtype)
        self._origins = np.zeros(0, np.uint8)
        self._retractions = 0  # of the segment that runs
        self._again = 0  # positions before this one were computed again, by the segment that runs

    @property
    def end(self) -> int:
        """The first position without a row: the next segment reports from here on."""
        return self.start + len(self._origins)

    def begin(self, tokens: int) -> None:
        """A segment begins that continues `tokens` sampled ones."""
        self._retractions = self._again = 0
        if tokens:
            self._computes_again(self._prompt_tokens + tokens - 1)

    def read(self, chunk: Chunk, tokens: int) -> None:
        """Read a chunk of the segment, after which the answer has `tokens` tokens.

        Raises EngineError for rows of another shape than the model's.
        """
        if self._computed_from is None and chunk.output_ids:
            self._computed_from = min(self.start, chunk.cached_tokens)
        if chunk.retractions > self._retractions:
            self._retractions = chunk.retractions
            # The tokens that came with this chunk may have been sampled before the retraction.
            self._computes_again(self._prompt_tokens + tokens - 1)
        if chunk.routed_experts is not None and tokens:
            self._append(chunk, self._prompt_tokens + tokens - 1)

    def _computes_again(self, end: int) -> None:
        """The positions before `end` are computed again."""
        self._computed_from, self._again = 0, end
        mark_recomputed(self._origins[: max(0, end - self.start)])

    def _append(self, chunk: Chunk, end: int) -> None:
        """Append the rows up to position `end`."""
        assert chunk.routed_experts is not None
        try:
            rows = RoutedExperts.parse(chunk.routed_experts, self._shape)
        except ValueError as error:
            raise EngineError(f"the engine's routed experts cannot be recorded: {error}") from error
        if len(rows) != end - self.end:
            if chunk.finish_reason == "abort":  # it may stop between a token and its report
                return
            raise EngineError(f"the engine reports the experts of {len(rows)} positions, not of {end - self.end}")
        mark_recomputed(rows.origins[: max(0, self._again - self.end)])
        self._ids = np.concatenate([self._ids, rows.ids])
        self._origins = np.concatenate([self._origins, rows.origins])

    def finished(self, tokens: int) -> CallRouting:
        """The routing of the call, of whose answer `tokens` tokens are kept: one row for each of its positions."""
        count = max(0, self._prompt_tokens + tokens - 1 - self.start)
        ids, origins = self._ids[:count], self._origins[:count]
        rest = RoutedExperts.missing(count - len(origins), self._shape.layers, self._shape.top_k, self._shape.dtype)
        experts = RoutedExperts(np.concatenate([ids, rest.ids]), np.concatenate([origins, rest.origins]))
        computed_from = self.start if self._computed_from is None else self._computed_from
        return CallRouting(start=self.start, computed_from=computed_from, experts=experts)
