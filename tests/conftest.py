"""Fixtures that every test may use: databases, two models, a fake engine, real SGLang servers, one of a kind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn.server

sys.path.insert(0, str(Path(__file__).parent))  # for `import databases` and so on
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other on a busy machine take minutes

import thoroughness  # noqa: F401 - chooses the profile of property tests
from absences import pytest_make_collect_report, pytest_runtest_makereport, pytest_unconfigure  # noqa: F401 - hooks
from databases import KINDS, Databases
from long_tests import pytest_collection_modifyitems, pytest_configure  # noqa: F401 - hooks
from serving import ENGINE_KEY, serving
from vllm_servers import vllm_engine, vllm_server, with_vllm  # noqa: F401 - fixtures

from agentrl.engine.prepared.version_host import CacheSpec
from agentrl.engine.server_process import Server
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineRejected
from agentrl.models import resolve_model
from agentrl.proxy.serving.connections import keep_what_is_loaded
from agentrl.store import Database
from agentrl.testing import FakeEngine

if TYPE_CHECKING:
    from agentrl.trainer.distributed import World

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job; what tests start should not be one
    signal.signal(signal.SIGINT, signal.default_int_handler)

LOOK_EVERY_S = 0.005

gc.disable()  # while tests are collected, which halves the time of that


def pytest_collection_finish() -> None:
    """Exempt tests and modules from garbage collection, which is on from here."""
    keep_what_is_loaded()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Called where there are several processes (`-n 2`)."""
    from spread import Spread

    return Spread(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores (`-n auto`), as tests often wait for other processes; at most four, for their memory."""
    return min(len(os.sched_getaffinity(0)) + 1, 4)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU that torch can use")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """A process group of one rank on the CPU; there can be only one in a process."""
    from agentrl.trainer.distributed import join_world

    with join_world("cpu") as w:
        yield w


@pytest.fixture(scope="session", autouse=True)
def fast_clients_and_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """httpx and the SDKs on it trust nobody, which spares each of them 30 ms of reading certificates.
    uvicorn, where it serves in this process, looks every 5 ms, not every 100 ms, whether it may end."""
    hurried = vars(asyncio) | {"sleep": lambda delay: asyncio.sleep(min(delay, LOOK_EVERY_S))}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-certificates")))
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**hurried))
        yield


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Makes and drops databases; for tests that need several, or one kind only."""
    made = Databases(tmp_path_factory.mktemp("databases"))
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """`sqlite`, then `postgresql`: a test with any of the fixtures below runs once on each."""
    return str(request.param)


@pytest.fixture
def empty_database_url(databases: Databases, database_kind: str) -> Iterator[str]:
    """URL of a database without tables."""
    with databases.lent(database_kind, migrated=False) as url:
        yield url


@pytest.fixture
def database_url(databases: Databases, database_kind: str) -> Iterator[str]:
    """URL of a database at the newest revision."""
    with databases.lent(database_kind) as url:
        yield url


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """A store at the newest revision, opened."""
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the 0.4M-parameter Qwen2; made in the cache the first time (10 s)."""
    return resolve_model("tiny")


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; made in the cache the first time (10 s)."""
    return resolve_model("smollm2")


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    """A scriptable engine that serves on a real socket."""
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one real SGLang server of the test session, on the tiny model. Tests that use it are marked `engine`."""
    if os.environ.get("PYTEST_XDIST_WORKER"):  # all processes of a session have folders in one
        (tmp_path_factory.getbasetemp().parent / "sglang").touch(exist_ok=False)  # see spread.py: one process starts it
    log_file = tmp_path_factory.mktemp("sglang") / "engine.log"
    cache = CacheSpec(root=tmp_path_factory.mktemp("versions"), limit_bytes=1 << 30)
    with serving(tiny_model, log_file, max_running_requests=32, version_cache=cache) as server:
        yield server


@pytest.fixture(scope="session")
def sglang_server_for_adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second one, which takes adapters, and asks for ENGINE_KEY."""
    log_file = tmp_path_factory.mktemp("sglang-adapters") / "engine.log"
    with serving(tiny_model, log_file, max_running_requests=32, lora_rank=8, key=ENGINE_KEY) as server:
        yield server


@pytest.fixture
async def sglang_for_adapters(sglang_server_for_adapters: Server, tiny_model: Path) -> Server:
    """That one with base weights as version 0, without adapters, empty."""
    async with aiohttp.ClientSession() as http:
        client = SGLangClient(sglang_server_for_adapters.url, http, key=ENGINE_KEY)
        await client.abort_all()
        for name in await client.adapters():
            await client.unload_adapter(name)
        if (await client.model_info()).weight_version:
            await client.update_weights_from_disk(tiny_model, 0)
    return sglang_server_for_adapters


@pytest.fixture
async def sglang_engine(sglang_server: Server, tiny_model: Path) -> Server:
    """The real server with base weights as version 0, running, empty; whatever a test before did to it is undone."""
    async with aiohttp.ClientSession() as http:
        client = SGLangClient(sglang_server.url, http)
        await client.pause("abort")
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.update_weights_from_disk(tiny_model, 0)
                    break
                except EngineRejected:  # the cache is flushed once the last aborted request is gone
                    await asyncio.sleep(0.2)
        await client.continue_generation()
    return sglang_server
