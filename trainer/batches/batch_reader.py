"""Reads tokens of a batch on one rank, from its cache and from the store, over a connection of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.domain.batches.outline import Outline, PathTokens, joined
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.errors import StoreError
from agentrl.store import Database
from agentrl.store.training.paths import path_tokens
from agentrl.trainer.batches.token_cache import TokenCache


class BatchReader:
    """The tokens of a run's trajectories. It only reads, and holds no connection between its calls.

    `found` and `missed` count trajectories that were in the cache, and those that were not.
    """

    def __init__(self, database: Database, cache: TokenCache) -> None:
        self.database, self.cache = database, cache
        self.found = self.missed = 0

    def read(self, outlines: Sequence[Outline]) -> Iterator[TrajectoryTokens]:
        """Trajectories, in the order given; the store is read in chunks of bounded size.

        Raises StoreUnavailable when the database does not answer for a minute, and StoreError, for damaged data too.
        """
        try:
            yield from self._read(outlines)
        except path_tokens.DAMAGED as error:
            raise StoreError(f"the recorded tokens of the batch are damaged: {error!r}") from error

    def _read(self, outlines: Sequence[Outline]) -> Iterator[TrajectoryTokens]:
        names = [one.trajectory_id for one in outlines]  # taken at once: the cache may drop the others meanwhile
        held = {name: tokens for name in names if (tokens := self.cache.take(name)) is not None}
        missing = {one.trajectory_id: one.length for one in outlines if one.trajectory_id not in held}
        paths = {one.trajectory_id: one.calls for one in outlines}
        chunks = path_tokens.chunks(missing)
        ready: dict[str, PathTokens] = {}
        self.missed += len(missing)
        self.found += len(outlines) - len(missing)
        for one in outlines:
            tokens = held.pop(one.trajectory_id, None)
            if tokens is None:
                while one.trajectory_id not in ready:
                    chunk = next(chunks)
                    ready |= self.database.query(path_tokens.read, {name: paths[name] for name in chunk})
                tokens = ready.pop(one.trajectory_id)
            yield joined(one, tokens)
