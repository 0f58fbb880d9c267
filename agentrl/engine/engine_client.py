"""The protocol of engines: what the proxy, the publisher and the supervisor call, for any inference server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from agentrl.domain.schemas import Json
from agentrl.engine.chunks import WITHOUT_WEIGHTS, Adapter, Chunk, parse_version
from agentrl.engine.control.preparation import Order, Preparation

PauseMode = Literal["retract", "in_place", "abort"]
RELEASED, RELOADING = WITHOUT_WEIGHTS


class Memory(StrEnum):
    """The contents of a server's GPU memory."""

    HELD = "held"  # weights and KV cache
    RELEASED = RELEASED  # neither; it is paused, and its weights must be loaded again
    RELOADING = RELOADING  # memory for weights, whose values are undefined, but no KV cache; it is paused


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The model and the weight version that a server reports."""

    model_path: str
    version: str  # the reported label; a decimal number on servers launched by agentrl

    @property
    def memory(self) -> Memory:
        """Whether weights are in GPU memory, read from the label: a restarted server has its first label."""
        return Memory(self.version) if self.version in WITHOUT_WEIGHTS else Memory.HELD

    @property
    def weight_version(self) -> int:
        """The label as a number. Raises EngineError for other labels, for example SGLang's `default`."""
        return parse_version(self.version)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What does not change while a server runs."""

    release: str  # of the server's package, for example 0.5.23
    context_tokens: int | None  # the longest prompt with its answer


class Health(StrEnum):
    """The state of a server."""

    SERVING = "serving"
    PAUSED = "paused"  # alive, but holds requests; also during its start
    DEAD = "dead"  # no answer


class Capability(StrEnum):
    """An optional ability of a server. All servers sample tokens with logprobs."""

    WEIGHTS = "weights"  # loads weights from a folder, verifiably
    EARLY_SPANS = "early spans"  # each event has the exact versions of its tokens, not only the last one
    FULL_LOGPROBS = "full logprobs"  # logprobs are of the whole distribution, also with top-p, top-k and min-p
    GRAMMARS = "grammars"  # JSON schemas, regular expressions, structural tags
    PAUSES = "pauses"  # all of PauseMode
    DIGESTS = "digests"  # reports digests of its weights, by the checkpoint's names
    PREPARATION = "preparation"  # prepares versions while it serves
    TENSORS = "tensors"  # takes tensors from a process group or from shared memory
    HANDLES = "handles"  # takes tensors from checkpoint-engine
    ADAPTERS = "adapters"  # loads low-rank adapters while requests run
    MEMORY = "memory"  # releases the memory of its weights and cache
    EXPERTS = "experts"  # reports the experts that a mixture chose


class Samples(Protocol):
    """Samples tokens, and pauses."""

    def generate(
        self,
        *,
        rid: str,
        input_ids: Sequence[int],
        sampling_params: Json,
        routing_key: str | None = None,
        timeout_s: float | None = None,
        top_logprobs: int = 0,
        adapter: Adapter | None = None,
        cache_key: str | None = None,
        experts_from: int | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Sample with base weights or an `adapter`; yields chunks until one has a finish reason.

        `sampling_params` are those of sampling_params.py. `rid` is unique and of fixed length. Closing the generator
        aborts the request. `timeout_s` limits the whole call, pauses included. Requests share the prefix cache of
        requests with the same `cache_key`. With `experts_from`, at most the prompt's length, the last chunk has the
        experts that the model chose from that position on.

        Raises EngineUnavailable when the server has lost the adapter, EngineDied when the connection breaks,
        EngineRejected for a request that the server refuses.
        """

    async def abort(self, rid: str) -> None:
        """Stop a request; its stream ends with finish reason `abort`. Unknown ids are ignored."""

    async def abort_all(self) -> None:
        """Stop all requests of all clients."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Hold all requests. `retract` allows a cache flush, `in_place` keeps the cache, `abort` ends the requests."""

    async def continue_generation(self) -> None:
        """Undo `pause`. Has no effect on a server that is not paused."""

    async def paused(self, timeout_s: float = 10.0) -> bool:
        """Whether the server holds requests because it is paused or starting.

        Raises EngineUnavailable without an answer, EngineRejected for a server that is too old.
        """

    async def health(self, timeout_s: float = 10.0) -> Health:
        """Whether the server is serving, paused or dead. Does not involve the model, so it is fast under load."""

    async def follows(self, timeout_s: float = 10.0) -> bool:
        """Whether the server's processes on a host other than its first are up. That host serves nothing but this."""

    def hang_up(self) -> None:
        """Close all streams of a hanging server; they raise EngineUnavailable."""

    def close(self) -> None:
        """Close all streams and connections."""


class HoldsWeights(Protocol):
    """Changes its weights, and reports which it has. The server is paused while they change."""

    async def model_info(self) -> EngineInfo:
        """The server's model and weight version."""

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of the weights in memory for each rank, by the checkpoint's names or by the server's own."""

    async def tensor_ranks(self) -> int:
        """The server's number of tensor-parallel processes."""

    async def update_weights_from_disk(
        self, path: Path | str, version: int | None, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load safetensors (all tensors or some) and report them as `version`; None keeps the reported label.

        Raises EngineRejected with the server's message. The loaded weights are then unknown: read `model_info`.
        """

    async def label_weights(self, version: int) -> None:
        """Set the version that the engine reports for its current weights."""

    async def flush_cache(self) -> None:
        """Clear the prefix cache. Raises EngineRejected while requests run."""

    async def adapters(self) -> dict[str, str]:
        """The loaded adapters: name → folder."""

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """Load an adapter folder in peft's format, while requests run. Raises EngineRejected with the reason."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter when no request uses it. Raises EngineRejected for an unknown name."""

    async def release_memory(self, *, cache: bool = True) -> None:
        """Free the memory of the weights, and with `cache` also that of the KV cache. The server is idle."""

    async def resume_weights(self) -> None:
        """Allocate the memory of the weights again; their values are undefined."""

    async def resume_cache(self) -> None:
        """Allocate the memory of the KV cache again."""


class TakesTensors(Protocol):
    """Takes tensors of a version from the trainer. Raises EngineRejected; the weights are then unknown."""

    async def join_group(
        self, group: str, *, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a process group as ranks `rank`, …; rank 0 listens at the given address."""

    async def leave_group(self, group: str, timeout_s: float | None = None) -> None:
        """Leave the process group. Raises EngineRejected for an unknown name."""

    async def begin_update(self) -> None:
        """Begin an update by tensors. Raises EngineRejected during another update."""

    async def end_update(self, timeout_s: float | None = None) -> None:
        """End the update. Raises EngineRejected when there is none."""

    async def receive_tensors(
        self, group: str, bucket: Json, *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Receive the tensors of a bucket from rank 0 of the group."""

    async def take_tensors(
        self, payloads: Sequence[str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Read tensors from shared memory: their location for each tensor rank of the server."""

    async def take_handles(
        self, handles: Mapping[str, str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Receive all weights from checkpoint-engine: for each GPU, the socket of the process on it."""


class PreparesVersions(Protocol):
    """Prepares a version while it serves another; see `control/preparation.py`."""

    async def prepare(self, order: Order, timeout_s: float = ...) -> Preparation:
        """Begin to fetch and stage a version; returns at once. Raises CannotPrepare, EngineRejected."""

    async def preparation(self, timeout_s: float = ...) -> Preparation | None:
        """How far the server is; None when it cannot prepare versions."""

    async def prepared_digests(self, name: str, timeout_s: float = ...) -> list[dict[str, str]]:
        """Digests of the staged weights for each rank. Raises NotPrepared."""

    def version_source(self, name: str, until: int) -> Json | None:
        """How other hosts read version `name` from this server until then; None when they cannot."""

    async def swap(self, name: str, version: int, *, flush_cache: bool = True, timeout_s: float | None = None) -> float:
        """Make the prepared weights those in use; returns the seconds of work. Raises NotPrepared."""


class EngineClient(Samples, HoldsWeights, TakesTensors, PreparesVersions, Protocol):
    """A client of one server. Methods for which the server lacks a capability raise EngineRejected."""

    url: str
    backend: str  # its name in `BACKENDS`

    async def capabilities(self) -> frozenset[Capability]:
        """The abilities of the server. Raises EngineUnavailable without an answer."""

    async def server_facts(self) -> ServerFacts:
        """The server's release and limits. Raises EngineRejected when a server of another kind answers."""
