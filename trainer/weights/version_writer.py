"""Writes a version's folder, `weights/v12-STEP_ID/`, from the ranks' parameters: every rank its own share.

    parameters ─► gathered to owners ─► digested, written, compared with the version before ─► facts ─► version.json
                  bucket by bucket        while the next bucket is gathered                    (rank 0)

The folder is a hidden draft until rank 0 renames it, so a folder is complete or absent. An owner keeps its share in the
engines' type where the next version may be a delta.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from agentrl.configs.publish_config import PublishConfig
from agentrl.configs.trainer_config import AdapterConfig
from agentrl.errors import StoreError
from agentrl.files import draft_of
from agentrl.trainer.distributed import World
from agentrl.trainer.models.tensor_naming import Names
from agentrl.trainer.weights.delta_policy import Wanted, is_too_large, wanted
from agentrl.trainer.weights.delta_share import DeltaShare, Previous
from agentrl.trainer.weights.engine_digests import compared
from agentrl.trainer.weights.gathering import Placement, placement
from agentrl.trainer.weights.ownership import Unit
from agentrl.trainer.weights.published import Published
from agentrl.trainer.weights.share_writer import Digests, Sink, WholeFiles
from agentrl.trainer.weights.version_folders import complete, undamaged
from agentrl.trainer.weights.version_tensors import for_engines, units
from agentrl.trainer.weights.weight_stream import Chunk, Stream
from agentrl.versions.delta_writer import DeltaPart, delta_name, joined
from agentrl.versions.version_manifest import Delta, TensorFacts, VersionFile, VersionManifest, manifest_of

TENSOR_ENDS = (".safetensors", ".bin")
"""Ends of the names of files with tensors, whole or as a delta."""


@dataclass(frozen=True, slots=True)
class ShareFacts:
    """The parts of a version that a rank has stored; `error` says why it could not."""

    tensors: list[TensorFacts] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    files: dict[str, VersionFile] = field(default_factory=dict)  # by the names of their tensors
    delta: DeltaPart | None = None
    error: str = ""


@dataclass
class VersionWriter:
    """Writes the versions of one run, one after another. Its methods are collective."""

    world: World
    base_model: Path
    names: Names
    adapter: AdapterConfig
    dtype: torch.dtype  # of matrices in engines
    config: PublishConfig
    compares: torch.dtype | None = None  # the engines' type, where their digests can be compared
    _placed: Placement | None = None
    _units: list[Unit] = field(default_factory=list)
    _previous: Previous = field(default_factory=Previous)
    _parent: tuple[str, str] | None = None  # name and checksum of the version whose shares are held
    _since_whole: int = 0

    def stream(self, parameters: Mapping[str, Tensor], owners: Sequence[int]) -> Stream:
        """The version that these parameters are, on its way to `owners`."""
        if self._placed is None:
            self._placed = placement(parameters, self.world)
            self._units = units(parameters, self.base_model, self.names, self.adapter, for_engines(self.dtype))
        return Stream(self._units, parameters, self._placed, self.world, owners, self.config.bucket_bytes)

    def write(
        self, folder: Path, parameters: Mapping[str, Tensor], prepares: Callable[[], bool] = lambda: False
    ) -> Published:
        """Write `folder`; returns what rank 0 needs to publish it.

        Tensors get the names of the base model's files and the engines' type, to which engines would round them. A
        folder that already holds them whole stays unchanged: engines may be reading it. `prepares` says on rank 0
        whether all engines can prepare a version. Raises StoreError on every rank when one cannot write its share.
        """
        stream = self.stream(parameters, range(self.world.size))
        files: Wanted = self.world.from_leader(partial(self._wanted, prepares))
        held = self.world.from_leader(partial(_checksum_in, folder))
        made = self._kept(stream, folder) if held is not None else None
        if made is None or made.checksum != held:
            made = self._written(stream, folder, files)
        return made

    def _wanted(self, prepares: Callable[[], bool]) -> Wanted:
        """The files of the next version. Rank 0 only."""
        return wanted(self.config, self.dtype.itemsize, prepares, None if self._parent is None else self._since_whole)

    def _kept(self, stream: Stream, folder: Path) -> Published:
        """The facts of a folder that was written from these parameters. The next version is then no delta of it."""
        self._forget()
        digests = self._digests(stream)
        pump(stream.chunks(), digests.add)
        everyones = self.world.everyones(ShareFacts(digests.tensors, digests.engine))
        manifest = manifest_of(folder.name, [fact for share in everyones for fact in share.tensors], [], None)
        return self._published(folder, manifest, everyones)

    def _written(self, stream: Stream, folder: Path, files: Wanted) -> Published:
        parent = self._parent if files.delta else None
        self._forget(keep_shares=parent is not None)
        with self._draft(folder) as draft:
            everyones = self._checked(folder, self._store(stream, draft, files, parent is not None))
            delta = None if parent is None else joined(*parent, [share.delta for share in everyones if share.delta])
            size = sum(fact.size_bytes for share in everyones for fact in share.tensors)
            density = None if delta is None else delta.density
            if delta is not None and is_too_large(delta.size_bytes, size, self.config):
                (draft / delta_name(self.world.rank, self.world.size)).unlink()
                delta = None
                if not files.whole:
                    files = Wanted(whole=True, delta=True)
                    everyones = self._checked(folder, self._store_held(stream, draft, everyones[self.world.rank]))
            made = self.world.from_leader(partial(self._complete, draft, folder, everyones, files.whole, delta))
        if files.delta:
            self._parent = (folder.name, made.checksum)
            self._since_whole = 0 if files.whole else self._since_whole + 1
        return replace(made, density=density)

    def _store(self, stream: Stream, draft: Path, files: Wanted, has_parent: bool) -> ShareFacts:
        """Store this rank's share as it comes."""
        digests, rank = self._digests(stream), self.world.rank
        sinks: list[Sink] = [digests]
        whole = delta = None
        try:
            with ExitStack() as opened:
                if files.whole:
                    whole = opened.enter_context(WholeFiles(draft, stream.files(rank)))
                    sinks.append(whole)
                if has_parent:
                    delta = opened.enter_context(DeltaShare(draft / delta_name(rank, self.world.size), self._previous))
                    sinks.append(delta)
                pump(stream.chunks(), partial(_feed, sinks, self._previous if files.delta else None))
        except OSError as error:
            return ShareFacts(error=f"rank {rank}: {error}")
        return ShareFacts(
            digests.tensors,
            digests.engine,
            whole.written if whole else {},
            delta.part() if delta else None,
        )

    def _store_held(self, stream: Stream, draft: Path, share: ShareFacts) -> ShareFacts:
        """Write whole files of the share that this rank holds."""
        try:
            with WholeFiles(draft, stream.files(self.world.rank)) as whole:
                for chunks in self._previous.chunks(self.config.bucket_bytes):
                    whole.add(chunks)
        except OSError as error:
            return ShareFacts(error=f"rank {self.world.rank}: {error}")
        return replace(share, files=whole.written)

    def _checked(self, folder: Path, share: ShareFacts) -> list[ShareFacts]:
        """Every rank's facts. Raises StoreError when one of them could not write."""
        everyones = self.world.everyones(share)
        for one in everyones:
            if one.error:
                raise StoreError(f"weights {folder} cannot be written ({one.error})")
        return everyones

    def _complete(
        self, draft: Path, folder: Path, everyones: Sequence[ShareFacts], is_whole: bool, delta: Delta | None
    ) -> Published:
        """Give the folder its name. Rank 0 only."""
        tensors = [fact for share in everyones for fact in share.tensors]
        files = {tensor: file for share in everyones for tensor, file in share.files.items()}
        try:
            manifest = complete(draft, folder, self.base_model, tensors, files if is_whole else None, delta)
        except OSError as error:
            raise StoreError(f"weights {folder} cannot be written ({error})") from error
        return self._published(folder, manifest, everyones)

    def _published(self, folder: Path, manifest: VersionManifest, everyones: Sequence[ShareFacts]) -> Published:
        return Published(
            path=folder.resolve(),
            checksum=manifest.checksum,
            size_bytes=manifest.tensor_bytes,
            digests={name: digest for share in everyones for name, digest in share.digests.items()},
            written_bytes=sum(file.size_bytes for file in manifest.files.values() if file.name.endswith(TENSOR_ENDS)),
            parent=manifest.delta.parent if manifest.delta else None,
            whole=manifest.whole is not None,
        )

    @contextmanager
    def _draft(self, folder: Path) -> Iterator[Path]:
        """A folder beside `folder` for all ranks to write in. Rank 0 deletes what is left of it."""
        draft: Path = self.world.from_leader(partial(_make_draft, folder))
        try:
            yield draft
        finally:
            if self.world.leads:
                shutil.rmtree(draft, ignore_errors=True)

    def _digests(self, stream: Stream) -> Digests:
        outputs = [output for unit in stream.units for output in unit.outputs]
        is_compared = self.compares is not None and self.config.verify
        engine = compared(outputs, self.compares) if self.compares is not None and is_compared else {}
        return Digests({part: name for name, parts in engine.items() for part in parts})

    def _forget(self, *, keep_shares: bool = False) -> None:
        """Whatever happens next, the held shares are no version's until it is written."""
        self._parent = None
        if not keep_shares:
            self._previous.clear()


def pump(buckets: Iterable[list[Chunk]], take: Callable[[list[Chunk]], None]) -> None:
    """Call `take` for every bucket, in a thread, while the next one is gathered.

    Other ranks wait for this one's parts of their buckets, so a failure is raised after the last.
    """
    failure: BaseException | None = None
    running: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as thread:
        for chunks in buckets:
            failure = failure or (running.exception() if running else None)
            running = thread.submit(take, chunks) if chunks and failure is None else None
        failure = failure or (running.exception() if running else None)
    if failure is not None:
        raise failure


def _feed(sinks: Sequence[Sink], held: Previous | None, chunks: list[Chunk]) -> None:
    """Give a bucket to all sinks at once, then hold it."""
    with ThreadPoolExecutor(len(sinks)) as pool:
        list(pool.map(lambda sink: sink.add(chunks), sinks))
    if held is not None:
        held.add(chunks)


def _make_draft(folder: Path) -> Path:
    draft = draft_of(folder)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"weights {folder} cannot be written ({error})") from error
    return draft


def _checksum_in(folder: Path) -> str | None:
    """The checksum of a folder that has all tensors, undamaged."""
    manifest = undamaged(folder)
    return None if manifest is None else manifest.checksum
