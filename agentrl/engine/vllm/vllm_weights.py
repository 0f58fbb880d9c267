"""vLLM's routes for weights, caches and adapters, and those of ours (`vllm_routes.py`)."""

from __future__ import annotations

from pathlib import Path

from agentrl.engine.control.control_requests import ControlRequests, rank_digests, weight_label
from agentrl.engine.engine_client import EngineInfo
from agentrl.engine.vllm.only_folders import OnlyFolders
from agentrl.engine.vllm.vllm_paths import DIGESTS, LOAD, NOT_FOUND
from agentrl.errors import EngineError, EngineKeyRefused, EngineRejected, EngineUnavailable

OURS = "start it with agentrl engine --backend vllm"


class WeightRoutes(ControlRequests, OnlyFolders):
    """The routes of one server that change or describe its weights."""

    async def model_info(self) -> EngineInfo:
        """The server's model and weight version."""
        label = weight_label(f"{self.url}/weight_info", await self._call("GET", "/weight_info"))
        root = next((one.get("root") for one in await self._models() if one.get("parent") is None), None)
        if not isinstance(root, str):
            raise EngineError(f"{self.url}/v1/models reports no base model")
        return EngineInfo(model_path=root, version=label)

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of the weights in memory for each rank: by the checkpoint's names and by vLLM's parameters."""
        try:
            return rank_digests(f"{self.url}{DIGESTS}", (await self._call("GET", DIGESTS)).get("ranks"))
        except EngineRejected as error:
            if error.status != NOT_FOUND:
                raise
        answer = await self._post("/weight_checker", {"action": "checksum"})
        return rank_digests(f"{self.url}/weight_checker", [answer.get("checksums")])

    async def update_weights_from_disk(
        self, path: Path | str, version: int | None, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load safetensors (all tensors or some) and report them as `version`; None keeps the reported label.

        Raises EngineRejected when the weights are not those of the server's model, which changes nothing, and for a
        server that agentrl did not start: its reload may load nothing and say that it did.
        """
        label = None if version is None else str(version)
        body = {"model_path": str(path), "weight_version": label, "flush_cache": flush_cache}
        try:
            await self._call("POST", LOAD, body, timeout_s)
        except EngineRejected as error:
            if error.status != NOT_FOUND:
                raise
            raise EngineRejected(f"{self.url} cannot load {path} verifiably: {OURS}") from error

    async def label_weights(self, version: int) -> None:
        """Set the version that the engine reports for its current weights."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def flush_cache(self) -> None:
        """Clear the prefix cache. Raises EngineRejected while requests use it."""
        if not await self._cleared(running=False):
            raise EngineRejected(f"{self.url} has requests that use the prefix cache")

    async def _cleared(self, *, running: bool) -> bool:
        """Clear the prefix cache; with `running` also what running requests have in it, which is computed again."""
        path = f"/reset_prefix_cache?reset_running_requests={'true' if running else 'false'}"
        return bool((await self._post(path, {})).get("success"))

    async def adapters(self) -> dict[str, str]:
        """The loaded adapters: name → folder."""
        return await self._adapters()

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """Load an adapter folder in peft's format, while requests run. Raises EngineRejected with the reason."""
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except (EngineUnavailable, EngineKeyRefused):
            raise
        except EngineError as error:  # vLLM answers 500 for an adapter that it cannot load, and hides paths
            said = f"{self.url} did not load adapter {name} from {path}: {error.engine_message or error}"
            raise EngineRejected(said, engine_message=error.engine_message) from error

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter when no request uses it. Raises EngineRejected for an unknown name."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})
