"""One SGLang server as a child process: command line, environment, start, log file, shutdown.

    launch(spec) ──► Server ──► await wait_healthy(on_progress) ──► … ──► stop()

A guard process (guard.py) is the server's parent. It ends the server and its children on request or when this process
dies.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp

from agentrl.configs.engine_config import CPU_REQUESTS
from agentrl.configs.trainer_config import ALL_LINEAR
from agentrl.engine.prepared.version_host import VERSION_CACHE, CacheSpec
from agentrl.engine.sglang_client import EngineClient, Health
from agentrl.engine.stored_weights import STORED_WEIGHTS, StoredWeights
from agentrl.environment import ENGINE_KEY, is_loopback, storage_variables, without_secrets
from agentrl.errors import EngineUnavailable, UserError
from agentrl.files import last_lines
from agentrl.models import check_model_folder, linear_layers
from agentrl.processes import children

POLL_S = 0.25
FIRST_PORT = 10_240
USUAL_FIRST_EPHEMERAL = 32_768
CPU_TOKENS = 16_384
"""Size of the key/value cache on a CPU, in tokens, where a configuration gives none."""
EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

Progress = Callable[[float, str], None]
"""Called during a start, with the elapsed seconds and the last line of the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """How to launch one server. Base weights are served as version `weight_version`."""

    model: Path
    port: int
    log_file: Path
    host: str = "127.0.0.1"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    max_total_tokens: int | None = None  # None: CPU_TOKENS on a CPU; on a GPU the server chooses
    max_running_requests: int | None = None  # None: CPU_REQUESTS on a CPU; on a GPU the server chooses
    tensor: int = 1  # the sizes of `resources.engines`
    pipeline: int = 1
    data: int = 1
    experts: int = 1
    hosts: int = 1  # over which the server is divided; all but host 0 serve no requests
    host_rank: int = 0
    leader: str | None = None  # HOST:PORT at which the hosts meet
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; empty: all
    memory_fraction: float | None = None
    memory_saver: bool = False  # its memory can be released; SGLang does so on a GPU only
    context_length: int | None = None
    chunked_prefill_tokens: int | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    weight_version: int = 0
    seed: int | None = None  # sampling seed, 0 to 2³¹ − 1; None: random
    deterministic: bool = False  # sample by each call's seed, independent of the batch
    routed_experts: bool = False  # report the experts that a mixture chose; only for models with experts
    lora_rank: int = 0  # largest rank of adapters that can be loaded; 0: none
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)  # names of the linear layers that adapters may change
    extra_args: tuple[str, ...] = ()
    stored_weights: StoredWeights | None = None  # where versions are that this host has no folder of
    version_cache: CacheSpec | None = None  # this host's cache of prepared versions; None: that of the default settings
    key: str | None = field(default=None, repr=False)  # the key that clients must send; optional on loopback

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{self.host}:{self.port}"


def argv(spec: EngineSpec) -> list[str]:
    """The command line of `spec`. Later arguments win, so `extra_args` can override all others.

    Raises ModelFolderError when the adapters' layers cannot be read from the model's files.
    """
    options = {
        "--model-path": str(spec.model),
        "--host": spec.host,
        "--port": str(spec.port),
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--weight-version": str(spec.weight_version),
    }
    cpu = spec.device == "cpu"
    chosen = {
        "--max-running-requests": spec.max_running_requests or (CPU_REQUESTS if cpu else None),
        "--max-total-tokens": spec.max_total_tokens or (CPU_TOKENS if cpu else None),
        "--random-seed": spec.seed,
        "--attention-backend": spec.attention_backend or ("torch_native" if cpu else None),
        "--tp-size": spec.tensor if spec.tensor > 1 else None,
        "--pp-size": spec.pipeline if spec.pipeline > 1 else None,
        "--dp-size": spec.data if spec.data > 1 else None,
        "--ep-size": spec.experts if spec.experts > 1 else None,
        "--nnodes": spec.hosts if spec.hosts > 1 else None,
        "--node-rank": spec.host_rank if spec.hosts > 1 else None,
        "--dist-init-addr": spec.leader,
        "--mem-fraction-static": spec.memory_fraction,
        "--context-length": spec.context_length,
        "--chunked-prefill-size": spec.chunked_prefill_tokens,
        "--kv-cache-dtype": spec.kv_cache_dtype,
        "--quantization": spec.quantization,
    }
    options |= {name: str(value) for name, value in chosen.items() if value is not None}
    flags = [
        "--incremental-streaming-output",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--constrained-json-disable-any-whitespace",  # else a small model may fill its budget with line breaks
    ]
    if spec.dtype != "float32":
        flags.append("--enable-fp32-lm-head")  # as in the trainer: logprobs from unrounded logits
    if spec.memory_saver and not cpu:
        flags.append("--enable-memory-saver")
    if spec.deterministic:
        flags.append("--enable-deterministic-inference")
    if spec.routed_experts:
        flags.append("--enable-return-routed-experts")
    if spec.lora_rank:
        options["--max-lora-rank"] = str(spec.lora_rank)
        if spec.device == "cpu":
            options["--lora-backend"] = "torch_native"
        flags += ["--enable-lora", "--lora-target-modules", *_lora_targets(spec)]
    pairs = [part for option in options.items() for part in option]
    return [sys.executable, "-m", "agentrl.engine.keyed_sglang", *pairs, *flags, *spec.extra_args]


def _lora_targets(spec: EngineSpec) -> list[str]:
    if spec.lora_targets == (ALL_LINEAR,):
        return linear_layers(spec.model)
    return sorted({target.rpartition(".")[2] for target in spec.lora_targets})


def environment(spec: EngineSpec) -> dict[str, str]:
    """The inherited environment, offline and without secrets except the key, and the access to an object storage if
    the engine reads versions there. On a CPU also without core binding.
    """
    env = without_secrets(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if spec.key is not None:
        env[ENGINE_KEY] = spec.key
    if spec.stored_weights is not None:
        env |= storage_variables(os.environ) | {STORED_WEIGHTS: spec.stored_weights.model_dump_json()}
    if spec.version_cache is not None:
        env[VERSION_CACHE] = spec.version_cache.model_dump_json()
    if spec.hosts > 1:
        env["SGLANG_HOST_IP"] = spec.host  # else it asks for the way to an address on the internet
    if spec.device == "cpu":
        env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        env.pop("SGLANG_USE_CPU_ENGINE", None)
        if spec.deterministic:
            env["TORCHDYNAMO_DISABLE"] = "1"  # else SGLang compiles its seeded sampling before the first answer
    elif spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    return env


def launch(spec: EngineSpec) -> Server:
    """Start a server without waiting for it.

    Raises UserError for an unusable model folder or port, and for a host off loopback without a key.
    """
    if spec.key is None and not is_loopback(spec.host):
        raise UserError(f"host {spec.host} is not loopback: an engine there needs a key")
    check_model_folder(spec.model)
    check_port(spec.host, spec.port)
    spec.log_file.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_file.open("ab") as log:
        log_start = log.tell()
        process = children.start_blocking(argv(spec), env=environment(spec), output=log)
    return Server(spec, process, log_start)


class Server:
    """A launched server, in any state."""

    def __init__(self, spec: EngineSpec, process: subprocess.Popen[bytes], log_start: int = 0) -> None:
        self.spec = spec
        self.url = spec.url
        self.started_at = time.monotonic()
        self._process = process
        self._log_start = log_start

    @property
    def pid(self) -> int:
        """Process id of the guard, which is the server's parent."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    async def wait_healthy(self, timeout_s: float = 300.0, on_progress: Progress | None = None) -> None:
        """Wait until the server is healthy. Raises EngineUnavailable, with the end of its log, when it dies or times
        out.
        """
        async with aiohttp.ClientSession() as http:
            client = EngineClient(self.url, http, key=self.spec.key)
            while not await self._is_up(client):
                elapsed_s = time.monotonic() - self.started_at
                if self.returncode is not None:
                    raise EngineUnavailable(f"the engine ended with status {self.returncode}{self._log_excerpt()}")
                if elapsed_s > timeout_s:
                    raise EngineUnavailable(f"the engine is not healthy after {timeout_s:.0f} s{self._log_excerpt()}")
                if on_progress is not None:
                    on_progress(elapsed_s, "".join(self._log_end(1)))
                await asyncio.sleep(POLL_S)

    async def _is_up(self, client: EngineClient) -> bool:
        if self.spec.host_rank:
            return await client.follows()
        return await client.health() is Health.SERVING

    async def wait(self) -> int:
        """Wait for the server's end; returns its exit status."""
        while True:
            if (status := self.returncode) is not None:
                return status
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """End the server and its children; returns when all have ended."""
        children.stop_blocking(self._process)

    def _log_end(self, n: int) -> list[str]:
        return last_lines(self.spec.log_file, n, self._log_start)

    def _log_excerpt(self) -> str:
        return "; its log ends:\n  " + "\n  ".join(self._log_end(8)) + f"\n(full log: {self.spec.log_file})"


def check_port(host: str, port: int) -> None:
    """Raise UserError when host:port cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def free_port(host: str = "127.0.0.1") -> int:
    """A random free port. Raises UserError when there is none.

    It is below the system's ephemeral ports, so that no connection takes it before the server binds it. Random choice
    makes collisions between processes rare.
    """
    ports = _ports_to_choose()
    start = secrets.randbelow(len(ports))
    for port in (*ports[start:], *ports[:start]):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UserError(f"cannot listen on {host}: {error.strerror}") from error
            else:
                return int(probe.getsockname()[1])
    raise UserError(f"no free port on {host}")


def _ports_to_choose() -> Sequence[int]:
    """The ports below the system's ephemeral range; 0 (the system's choice) when there are none."""
    try:
        first_ephemeral = int(EPHEMERAL_RANGE_FILE.read_text().split()[0])
    except OSError:  # not Linux
        first_ephemeral = USUAL_FIRST_EPHEMERAL
    return range(FIRST_PORT, first_ephemeral) or (0,)


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Resolve `auto` to CUDA when torch finds a GPU."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
