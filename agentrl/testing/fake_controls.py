"""The control routes of the fake engine, and the state that they change: pauses, aborts, weights, adapters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.domain.schemas import Json
from agentrl.testing.fake_preparation import folder_digests

MEMORY = ("kv_cache", "weights")
"""The tags of the memory that can be released."""
Control = Callable[[Json], Awaitable[tuple[int, Json | None]]]
"""Maps the body of a request to the status and the body of its answer."""


class Controls:
    """State of one engine, with the semantics of SGLang's control routes.

        serving ──pause_generation──► paused ──continue_generation──► serving
        begin_weight_update ► update_weights_from_{distributed,tensor} … ► end_weight_update
        paused ──release_memory_occupation──► without weights or KV cache ──resume_memory_occupation──► paused

    Like SGLang the engine dies of a release while requests run, of a resume without a release, and of weights that it
    uses or loads while their memory is released.

    Attributes that a test may set: `fail_next_update` (the error of the next weight update or adapter load),
    `update_takes_s` (how long an update from a folder takes), `digests` (of the weights; None derives them from the
    source of the weights). `released` names the memory that is released: "weights", "kv_cache". `undefined` is true
    from the release of the weights until all of them are loaded. `content` has the digests of the tensors that were
    read from a folder or swapped in, where the engine `reads_content`.
    """

    def __init__(self, *, version: int, model_path: str, takes_adapters: bool, reads_content: bool = False) -> None:
        self.base_version = version
        self.version: int | str = version
        self.model_path = model_path
        self.takes_adapters = takes_adapters
        self.paused = False
        self.pause_mode = "abort"
        self.scheduler_paused = False  # `abort` alone ends the requests and pauses only the HTTP process
        self.fail_next_update: str | None = None
        self.update_takes_s = 0.0
        self.digests: dict[str, str] | None = None
        self.reads_content = reads_content
        self.content: dict[str, str] | None = None
        self.released: set[str] = set()
        self.undefined = False
        self.gpu_handles: set[str] = set()  # its GPUs, if it has checkpoint-engine
        self.groups: set[str] = set()  # process groups that it joined; no tensors are received over them
        self.updating = False  # between begin_weight_update and end_weight_update
        self.adapters: dict[str, str] = {}  # name → folder
        self.running: set[str] = set()  # request ids
        self._loaded = "the weights of its start"
        self._aborted: set[str] = set()
        self.retractions = Counter[str]()  # of running requests
        self._once_loaded: dict[str, str] = {}
        self._in_use: dict[str, str] = {}  # request id → adapter
        self._changed = asyncio.Condition()
        self._adapters_change = asyncio.Lock()

    def _reset(self) -> None:
        """The state of an engine that has just started: base weights, not paused, no adapters."""
        self.version, self.paused, self.content = self.base_version, False, None
        self.scheduler_paused = False
        self.adapters, self._once_loaded, self._in_use = {}, {}, {}
        self.groups, self.updating = set(), False
        self.released, self.undefined = set(), False
        self._changed, self._adapters_change = asyncio.Condition(), asyncio.Lock()

    def _controls(self) -> dict[str, Control]:
        """The handler of each control route."""
        return {
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_weights_from_disk,
            "/update_weight_version": self._update_weight_version,
            "/init_weights_update_group": self._init_weights_update_group,
            "/destroy_weights_update_group": self._destroy_weights_update_group,
            "/begin_weight_update": self._begin_weight_update,
            "/end_weight_update": self._end_weight_update,
            "/update_weights_from_distributed": self._update_weights_from_distributed,
            "/update_weights_from_tensor": self._update_weights_from_tensor,
            "/update_weights_from_ipc": self._update_weights_from_ipc,
            "/load_lora_adapter": self._load_lora_adapter,
            "/unload_lora_adapter": self._unload_lora_adapter,
            "/flush_cache": self._flush_cache,
            "/release_memory_occupation": self._release_memory_occupation,
            "/resume_memory_occupation": self._resume_memory_occupation,
            "/weights_checker": self._weights_checker,
        }

    async def _abort_request(self, body: Json) -> tuple[int, Json]:
        rid = body.get("rid", "")
        self._aborted |= {r for r in self.running if body.get("abort_all") or r.startswith(rid)}
        return 200, {}

    async def _pause_generation(self, body: Json) -> tuple[int, Json]:
        self.paused, self.pause_mode = True, body.get("mode", "abort")
        if self.pause_mode == "abort":
            self._aborted |= self.running
        else:
            self.scheduler_paused = True
        if self.pause_mode == "retract":
            self.retractions.update(self.running)
        return 200, {"status": "ok"}

    async def _continue_generation(self, body: Json) -> tuple[int, Json]:
        if self.released or self.undefined:
            await self._die()
        self.paused = self.scheduler_paused = False
        return 200, {"status": "ok"}

    async def _update_weights_from_disk(self, body: Json) -> tuple[int, Json]:
        await asyncio.sleep(self.update_takes_s)
        if "weights" in self.released:
            await self._die()
        problem, self.fail_next_update = self.fail_next_update, None
        problem = problem or missing_folder(body["model_path"])
        if problem is not None:
            return 400, {"success": False, "message": problem}
        self.model_path = body["model_path"]
        self.version = body.get("weight_version") or self.version
        self._loaded, self.undefined = f"{self.model_path}@{self.version}", False
        self.content = await asyncio.to_thread(folder_digests, Path(self.model_path)) if self.reads_content else None
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    async def _die(self) -> None:
        """End the server at once; does not return."""
        raise NotImplementedError

    def _is_idle(self) -> bool:
        """Whether no request occupies the KV cache."""
        return not self.running or (self.paused and self.pause_mode == "retract")

    async def _release_memory_occupation(self, body: Json) -> tuple[int, None]:
        tags = set(body.get("tags") or MEMORY)
        if not self._is_idle() or tags & self.released:
            await self._die()
        self.released |= tags
        self.undefined |= "weights" in tags
        return 200, None

    async def _resume_memory_occupation(self, body: Json) -> tuple[int, None]:
        tags = set(body.get("tags") or MEMORY)
        if not tags <= self.released:
            await self._die()
        self.released -= tags
        return 200, None

    async def _update_weight_version(self, body: Json) -> tuple[int, Json]:
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    async def _init_weights_update_group(self, body: Json) -> tuple[int, Json]:
        self.groups.add(body["group_name"])
        return _done(None)

    async def _destroy_weights_update_group(self, body: Json) -> tuple[int, Json]:
        known = body["group_name"] in self.groups
        self.groups.discard(body["group_name"])
        return _done(None if known else "The group to be destroyed does not exist.")

    async def _begin_weight_update(self, body: Json) -> tuple[int, Json]:
        was, self.updating = self.updating, True
        return _done("a weight-update session is already open" if was else None)

    async def _end_weight_update(self, body: Json) -> tuple[int, Json]:
        was, self.updating = self.updating, False
        return _done(None if was else "no weight-update session is open")

    async def _update_weights_from_distributed(self, body: Json) -> tuple[int, Json]:
        if self.updating and body["group_name"] not in self.groups:
            return _done(f"Failed to receive weights: Group {body['group_name']} not in {sorted(self.groups)}.")
        return await self._update_weights_from_tensor(body)

    async def _update_weights_from_tensor(self, body: Json) -> tuple[int, Json]:
        problem, self.fail_next_update = self.fail_next_update, None
        if "weights" in self.released:
            await self._die()
        if not self.updating:
            problem = "must run between begin_weight_update() and end_weight_update()"
        return self._took(body, problem)

    async def _update_weights_from_ipc(self, body: Json) -> tuple[int, Json]:
        problem, self.fail_next_update = self.fail_next_update, None
        if "weights" in self.released:
            await self._die()
        if not self.gpu_handles:
            problem = "IPC weight update failed: ImportError checkpoint-engine is not installed."
        elif not self.gpu_handles <= body["zmq_handles"].keys():
            missing = min(self.gpu_handles - body["zmq_handles"].keys())
            problem = f"Device UUID {missing} not found in zmq_handles: {list(body['zmq_handles'])}"
        return self._took(body, problem)

    def _took(self, body: Json, problem: str | None) -> tuple[int, Json]:
        """The answer to tensors that were taken, or that were not because of a problem."""
        if problem is None:
            self.version = body.get("weight_version") or self.version
            self._loaded, self.undefined, self.content = f"{self.model_path}@{self.version}", False, None
        return _done(problem)

    async def _load_lora_adapter(self, body: Json) -> tuple[int, Json | None]:
        async with self._adapters_change:
            problem = self._load(body["lora_name"], body["lora_path"])
        return (200 if problem is None else 400), {"success": problem is None, "error_message": problem or ""}

    def _load(self, name: str, path: str) -> str | None:
        """Load an adapter. Returns the error, or None."""
        problem, self.fail_next_update = self.fail_next_update, None
        if not self.takes_adapters:
            problem = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        elif name in self.adapters:
            problem = f"Failed to load LoRA adapter {name} because it is already loaded"
        problem = problem or missing_folder(path)
        if problem is None:
            self.adapters[name] = self._once_loaded[name] = path
        return problem

    async def _unload_lora_adapter(self, body: Json) -> tuple[int, Json | None]:
        name = body["lora_name"]
        async with self._adapters_change:
            if self.adapters.pop(name, None) is None:
                return 400, {"success": False, "error_message": f"LoRA with name {name} does not exist."}
            async with self._changed:
                await self._changed.wait_for(lambda: name not in self._in_use.values())
        return 200, {"success": True, "error_message": ""}

    async def _name_adapter(self, rid: str, name: str) -> str | None:
        """Let a request use an adapter; one that was unloaded is loaded again. Returns the error, or None."""
        if name not in self._once_loaded:
            return f"Got LoRA adapter that has never been loaded: {name}"
        if name not in self.adapters:
            async with self._adapters_change:
                problem = self._load(name, self._once_loaded[name])
            if problem is not None:
                return f"Failed to implicitly load LoRA adapter {name}: {problem}"
        self._in_use[rid] = name
        return None

    async def _flush_cache(self, body: Json) -> tuple[int, Json]:
        return (200, {}) if self._is_idle() else (400, {"message": "requests are running"})

    async def _weights_checker(self, body: Json) -> tuple[int, Json]:
        return 200, {"success": True, "ranks": [{"checksums": self._weights_digests()}]}

    def _weights_digests(self) -> dict[str, str]:
        return self.digests or self.content or {"weights": self._loaded}


def _done(problem: str | None) -> tuple[int, Json]:
    return (200 if problem is None else 400), {"success": problem is None, "message": problem or "Success"}


def missing_folder(folder: str) -> str | None:
    """Why a folder cannot be loaded, or None."""
    return None if Path(folder).is_dir() else f"no such folder: {folder}"
