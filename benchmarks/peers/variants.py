"""How each variant of `benchmarks/proxy.py` is started and called. docs/proxy-benchmark.md gives the reasons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from proxied import start_proxy

HERE = Path(__file__).parent
PEERS = HERE.parent.parent / ".venv-peers" / "bin"
CHAT = "/v1/chat/completions"
KEY = "sk-benchmark"
START_S = 120.0


@dataclass
class Variant:
    """One gateway to the engine, started."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None  # None: the engine itself
    path: str = CHAT
    opens: bool = False


@dataclass(frozen=True)
class Place:
    """The arguments with which a variant is started."""

    folder: Path
    engine: str
    port: int
    model: Path


def agentrl(place: Place) -> Variant:
    """The proxy itself: it sends every reply after its commit."""
    process = start_proxy(place.folder, [place.engine], place.port, place.model)
    return Variant("agentrl", place.port, process, opens=True)


def agentrl_async(place: Place) -> Variant:
    """The proxy with replies that do not wait for their commit."""
    program = (str(HERE / "agentrl_async.py"),)
    process = start_proxy(place.folder, [place.engine], place.port, place.model, program)
    return Variant("agentrl_async", place.port, process, opens=True)


def starlette_httpx(place: Place) -> Variant:
    """The simplest pass-through."""
    process = _start(place, "python", str(HERE / "starlette_httpx.py"), place.engine, str(place.port))
    return Variant("starlette_httpx", place.port, process)


def fastapi_aiohttp(place: Place) -> Variant:
    """The pass-through with the faster client."""
    process = _start(place, "python", str(HERE / "fastapi_aiohttp.py"), place.engine, str(place.port))
    return Variant("fastapi_aiohttp", place.port, process)


def litellm(place: Place) -> Variant:
    """LiteLLM's proxy with its documented production settings, one worker, no callbacks, no database."""
    backend = {"model": "openai/default", "api_base": f"{place.engine}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "default", "litellm_params": backend}],
        "litellm_settings": {
            "request_timeout": 600,
            "set_verbose": False,
            "json_logs": False,
            "telemetry": False,
            "num_retries": 0,
            "callbacks": [],
            "success_callback": [],
            "failure_callback": [],
            "cache": False,
        },
        "general_settings": {"master_key": KEY, "disable_error_logs": True, "disable_spend_logs": True},
    }
    (place.folder / "litellm.yaml").write_text(json.dumps(config))  # JSON is YAML
    argv = ["--config", str(place.folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(place.port)]
    env = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = _start(place, "litellm", *argv, "--num_workers", "1", "--telemetry", "False", **env)
    return Variant("litellm", place.port, process)


def rllm(place: Place) -> Variant:
    """rLLM's gateway with its default store, SQLite; no access log."""
    argv = ["--host", "127.0.0.1", "--port", str(place.port), "--worker", f"{place.engine}/v1", "--store", "sqlite"]
    argv += ["--db-path", str(place.folder / "rllm.db"), "--log-level", "warning"]
    process = _start(place, "rllm-model-gateway", *argv)
    return Variant("rllm", place.port, process, path="/sessions/{session}" + CHAT)


def direct(place: Place) -> Variant:
    """No proxy."""
    return Variant("direct", int(place.engine.rpartition(":")[2]), None)


VARIANTS: dict[str, Callable[[Place], Variant]] = {
    starter.__name__: starter
    for starter in (agentrl, agentrl_async, starlette_httpx, fastapi_aiohttp, litellm, rllm, direct)
}
OF_PEERS = frozenset({"starlette_httpx", "fastapi_aiohttp", "litellm", "rllm"})


def start_engine(payload: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the fake engine in a separate process."""
    return subprocess.Popen([sys.executable, "-m", "peers.fake_sglang", str(payload), str(port)], cwd=HERE.parent)


def start_load(payload: Path) -> subprocess.Popen[bytes]:
    """Start the load generator, which reads orders from its input."""
    argv = [sys.executable, "-m", "peers.load", str(payload)]
    return subprocess.Popen(argv, cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process; send it SIGTERM when the block ends, and SIGKILL if it does not end."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_answering(port: int, process: subprocess.Popen[bytes] | None) -> None:
    """Wait for the first answer of any status (the path is LiteLLM's). Raises SystemExit when there is none."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"no server answers on port {port}: {process.args if process is not None else 'the engine'}")


def _start(place: Place, program: str, *argv: str, **env: str) -> subprocess.Popen[bytes]:
    """Start a program in the peers' environment; its output goes to a file."""
    with (place.folder / "peer.log").open("ab") as log:
        command = [str(PEERS / program), *argv]
        return subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log, cwd=place.folder)
