"""A leased batch, as each rank knows it: all outlines, and tokens on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from agentrl.domain.batches.outline import BatchOutline, Outline
from agentrl.domain.schemas import TrajectoryTokens, joined_digest
from agentrl.trainer.batches.batch_reader import BatchReader
from agentrl.trainer.distributed import World


class LeasedBatch:
    """A step's batch: whole groups, oldest first. `version` is the policy's version before the step."""

    def __init__(self, outline: BatchOutline, reader: BatchReader) -> None:
        self.outline = outline
        self._reader = reader
        self._digests: dict[int, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="digests")

    @property
    def step_id(self) -> str:
        """The step's id in the store."""
        return self.outline.step_id

    @property
    def step(self) -> int:
        """The step's number."""
        return self.outline.step

    @property
    def version(self) -> int:
        """The policy's version before the step."""
        return self.outline.version

    @property
    def ages(self) -> dict[int, int]:
        """Weight version of a token in the batch → its age at this step."""
        return self.outline.ages

    @property
    def outlines(self) -> list[Outline]:
        """All of each trajectory but its tokens."""
        return self.outline.trajectories

    @property
    def trajectories(self) -> list[TrajectoryTokens]:
        """The whole batch, read from the store by this rank, each time. A step needs only a share of it."""
        return list(self._reader.read(self.outlines))

    def read(self, indices: Sequence[int]) -> Iterator[TrajectoryTokens]:
        """The trajectories at some indices, in order. A thread computes their digests."""
        for i, trajectory in zip(indices, self._reader.read([self.outlines[i] for i in indices]), strict=True):
            if i not in self._digests:
                self._digests[i] = self._threads.submit(trajectory.digest)
            yield trajectory

    def digest(self, world: World) -> str:
        """The batch's digest (`Batch.digest`), from what each rank has read; trajectories that no rank needed are read
        now, by the ranks in turn. Collective.
        """
        known = set().union(*world.everyones(set(self._digests)))
        rest = [i for i in range(len(self.outlines)) if i not in known]
        for _ in self.read(rest[world.rank :: world.size]):
            pass
        mine = {i: digest.result() for i, digest in self._digests.items()}
        self._threads.shutdown()
        found: dict[int, bytes] = {}
        for theirs in world.everyones(mine):
            found |= theirs
        return joined_digest(found[i] for i in range(len(self.outlines)))
