"""SGLang's routes for weights, memory, caches and adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.domain.schemas import Json
from agentrl.engine.control.control_requests import ControlRequests, rank_digests, weight_label
from agentrl.engine.engine_client import RELEASED, RELOADING, EngineInfo
from agentrl.errors import EngineError, EngineRejected

MOST_RANKS = 10_000
"""The largest number of tensor-parallel processes that a server may report."""


class WeightControls(ControlRequests):
    """The routes of one server that change or describe its weights."""

    async def release_memory(self, *, cache: bool = True) -> None:
        """Free the memory of the weights, and with `cache` also that of the KV cache.

        The server must be paused and idle, else it dies; call `flush_cache` first, which is refused otherwise. Its
        weights are then undefined, and it must not continue before `resume_weights`, a load of all weights,
        `resume_cache` and `label_weights`.
        """
        await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"] if cache else ["weights"]})
        await self._relabel(RELEASED)

    async def resume_weights(self) -> None:
        """Allocate the memory of the weights again. A server that has not released it dies."""
        await self._post("/resume_memory_occupation", {"tags": ["weights"]})
        await self._relabel(RELOADING)

    async def resume_cache(self) -> None:
        """Allocate the memory of the KV cache again. A server that has not released it dies."""
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    async def update_weights_from_disk(
        self, path: Path | str, version: int | None, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load safetensors (all tensors or some) and report them as `version`; None keeps the reported label.

        Raises EngineRejected with the server's message. The loaded weights are then unknown: read `model_info`.
        """
        body = {"model_path": str(path), "weight_version": _label(version), "flush_cache": flush_cache}
        answer = await self._call("POST", "/update_weights_from_disk", body, timeout_s)
        if not answer.get("success"):
            raise EngineRejected(f"{self.url} did not load {path}: {answer.get('message')}")

    async def label_weights(self, version: int) -> None:
        """Set the version that the engine reports for its current weights."""
        await self._relabel(str(version))

    async def _relabel(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def join_group(
        self, group: str, *, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a process group as ranks `rank`, …; rank 0 listens at the given address. Returns when all members have
        joined.

        A server with several tensor ranks joins with all of them. It answers no other request meanwhile.
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._call("POST", "/init_weights_update_group", body, timeout_s)

    async def leave_group(self, group: str, timeout_s: float | None = None) -> None:
        """Leave the process group. Raises EngineRejected for an unknown name."""
        await self._call("POST", "/destroy_weights_update_group", {"group_name": group}, timeout_s)

    async def begin_update(self) -> None:
        """Begin an update by tensors. Raises EngineRejected during another update."""
        await self._post("/begin_weight_update", {})

    async def end_update(self, timeout_s: float | None = None) -> None:
        """End the update. Raises EngineRejected when there is none."""
        await self._call("POST", "/end_weight_update", {}, timeout_s)

    async def receive_tensors(
        self, group: str, bucket: Json, *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Receive tensors from rank 0 of the group: `names`, `dtypes` and `shapes` of the bucket.

        With a `version`, report it from then on. Raises EngineRejected; the weights are then unknown.
        """
        body = {**bucket, "group_name": group, "flush_cache": flush_cache, "weight_version": _label(version)}
        await self._call("POST", "/update_weights_from_distributed", body, timeout_s)

    async def take_tensors(
        self, payloads: Sequence[str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Read tensors from shared memory: their location (a base64 pickle) for each tensor rank of the server.

        With a `version`, report it from then on. Raises EngineRejected; the weights are then unknown.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "flush_cache": flush_cache,
            "weight_version": _label(version),
        }
        await self._call("POST", "/update_weights_from_tensor", body, timeout_s)

    async def take_handles(
        self, handles: Mapping[str, str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Receive all weights from checkpoint-engine: for each GPU (`GPU-UUID`), the socket of the process on it.

        The server needs checkpoint-engine, of the version that sends. Raises EngineRejected; the weights are then
        unknown.
        """
        body = {"zmq_handles": dict(handles), "flush_cache": flush_cache, "weight_version": _label(version)}
        answer = await self._call("POST", "/update_weights_from_ipc", body, timeout_s)
        if not answer.get("success"):
            raise EngineRejected(f"{self.url} did not take the weights: {answer.get('message')}")

    async def tensor_ranks(self) -> int:
        """The server's number of tensor-parallel processes."""
        ranks = (await self._call("GET", "/server_info")).get("tp_size", 1)
        if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
            raise EngineError(f"{self.url}/server_info reports no number of tensor ranks: {ranks!r:.40}")
        return ranks

    async def adapters(self) -> dict[str, str]:
        """The loaded adapters: name → folder."""
        return await self._adapters()

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """Load an adapter folder in peft's format, while requests run. Raises EngineRejected with the server's message.

        The server does not validate it: tensors of a wrong shape crash it at the adapter's first use.
        """
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter when no request uses it. Until then the server loads and unloads no other.

        Raises EngineRejected for an unknown name.
        """
        await self._post("/unload_lora_adapter", {"lora_name": name})

    async def flush_cache(self) -> None:
        """Clear the prefix cache. Raises EngineRejected while requests run."""
        await self._post("/flush_cache", {})

    async def model_info(self) -> EngineInfo:
        """The server's model and weight version."""
        info = await self._call("GET", "/model_info")
        label = weight_label(f"{self.url}/model_info", info)
        if not isinstance(info.get("model_path"), str):
            raise EngineError(f"{self.url}/model_info reports no model_path")
        return EngineInfo(model_path=info["model_path"], version=label)

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of the weights in memory, by the server's names, for each rank."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks")
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
            raise EngineError(f"{self.url}/weights_checker reports no ranks")
        return rank_digests(f"{self.url}/weights_checker", [rank.get("checksums") for rank in ranks])


def _label(version: int | None) -> str | None:
    return None if version is None else str(version)
