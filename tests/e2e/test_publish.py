"""Publishing to real SGLang by every transport: what it serves then is what the trainer has, whatever went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil
import pytest
import torch
from borrowed import proxy_fixtures
from databases import Databases
from run_records import create_run
from sampling import CLOSE, gaps, sampled
from serving import add_version, serving

from agentrl.configs.publish_config import PublishConfig
from agentrl.configs.trainer_config import LoraConfig
from agentrl.domain.schemas import Json, TrajectoryTokens
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server, free_port, launch
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.store import Database, events
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.publish import tensor_broadcast
from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.weights.published import Published
from agentrl.trainer.weights.version_writer import VersionWriter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
proxy = proxy_fixtures("proxy_fixtures_of_publish")
TRANSPORTS = ("disk", "distributed", "tensor")
BUCKET_BYTES = 300_000
REPORTED = {"disk": "prepared", "distributed": "distributed", "tensor": "tensor"}
"""How an engine says that it got a version: from a folder it is prepared while the engine serves."""
METHODS = {"distributed": "receive_tensors", "tensor": "take_tensors"}
"""By which an engine gets a bucket."""


@dataclass
class Run:
    """A run of the tiny model, a proxy before the real engine, and a trainer's weights."""

    url: str
    engines: list[str]
    database: Database
    run_id: str
    base: Path
    folder: Path
    world: World
    said: list[str] = field(default_factory=list)
    writer: VersionWriter = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)

    @property
    def engine(self) -> str:
        """The first."""
        return self.engines[0]

    def policy(self, seed: int) -> Policy:
        """The base model, moved."""
        policy = load_sharded(Policy, self.base, self.world.mesh)
        torch.manual_seed(seed)
        with torch.no_grad():
            for _, p in policy.trainable():
                p.add_(torch.randn_like(p), alpha=0.02)
        return policy

    def write(self, version: int, policy: Policy, dtype: torch.dtype = torch.float32) -> Published:
        """As the trainer does once a step is durable."""
        config = PublishConfig(bucket_bytes=BUCKET_BYTES)
        self.writer = VersionWriter(self.world, self.base, policy.names, LoraConfig(), dtype, config, dtype)
        self.parameters = dict(policy.trainable())
        made = self.writer.write(self.folder / f"v{version}-s", self.parameters)
        add_version(self.database, self.run_id, version, made.path, made.checksum)
        return made

    def publish(self, version: int, made: Published, **settings: Any) -> Json:
        """Publish what was written last, by the trainer's publisher; the event of it."""
        config = PublishConfig(**{"timeout_s": 20} | settings)
        publisher = Publisher(self.url, "admin-key", lambda _: False, self.said.append, config)
        offers = Offers(self.world, partial(self.writer.stream, self.parameters))
        assert publisher.publish(version, 0, made, offers)
        *_, last = self.database.query(events.of_run, self.run_id, "publish")
        return last.data


@pytest.fixture
def pause() -> str:
    """`publish.pause` of the run."""
    return "retract"


@pytest.fixture
def others() -> list[Server]:
    """Engines of the run beside the one that tests share."""
    return []


@pytest.fixture
async def run(
    sglang_engine: Server,
    tiny_model: Path,
    databases: Databases,
    tmp_path: Path,
    world: World,
    pause: str,
    others: list[Server],
) -> AsyncIterator[Run]:
    engines = [server.url for server in (sglang_engine, *others)]
    config = {
        "name": "test",
        "model": str(tiny_model),
        "agent": "a:B",
        "tasks": "t.jsonl",
        "steps": 9,
        "rollout": {"group_size": 1, "min_group_size": 1},
        "publish": {"pause": pause},
    }
    with databases.lent("sqlite") as url:
        database = Database(url)
        run_id = database.transact(lambda conn: create_run(conn, config=config, base_model=tiny_model, steps=9))
        port = free_port()
        with proxy.serve_proxy(url, engines, port):
            yield Run(f"http://127.0.0.1:{port}", engines, database, run_id, tiny_model, tmp_path, world)
        database.close()


async def serves(run: Run, version: int, policy: Policy) -> None:
    """The engines report the version, and score by these weights."""
    for url in run.engines:
        async with aiohttp.ClientSession() as http:
            client = SGLangClient(url, http)
            assert (await client.model_info()).weight_version == version
            assert not await client.paused()
        assert gaps(policy, await sampled(url, run.base, 1.0)).mean() <= CLOSE


async def digests(run: Run) -> dict[str, str]:
    async with aiohttp.ClientSession() as http:
        (found,) = await SGLangClient(run.engine, http).checksums()
    return found


async def test_every_transport_leaves_the_trainers_weights(run: Run) -> None:
    found = []
    policies = {transport: run.policy(seed) for seed, transport in enumerate(TRANSPORTS)}
    policies["again"] = policies["disk"]
    for version, (transport, policy) in enumerate(policies.items(), 1):
        by = transport if transport in TRANSPORTS else "distributed"
        made = run.write(version, policy)
        event = await asyncio.to_thread(run.publish, version, made, transport=by)
        assert event["transport"] == {run.engine: REPORTED[by]}
        assert event["verified"][run.engine] > 10
        assert event["bytes"] == made.size_bytes > 2 * BUCKET_BYTES
        await serves(run, version, policy)
        found.append(await digests(run))
    assert found[0] == found[3]  # the same weights by two ways
    assert found[0] != found[1] != found[2]
    assert run.said == []


async def test_weights_that_cannot_be_sent_are_read_from_the_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = run.policy(1)
    made = run.write(1, policy)
    monkeypatch.setattr(tensor_broadcast._Sender, "run", half_sent(tensor_broadcast._Sender.run))
    event = await asyncio.to_thread(run.publish, 1, made, transport="distributed", timeout_s=3)
    assert event["transport"] == {run.engine: "disk"}
    assert event["verified"][run.engine] > 10
    await serves(run, 1, policy)
    monkeypatch.undo()
    policy = run.policy(2)
    event = await asyncio.to_thread(run.publish, 2, run.write(2, policy), transport="distributed")
    assert event["transport"] == {run.engine: "distributed"}
    await serves(run, 2, policy)


@pytest.mark.long
class TestBfloat16Engine:
    @pytest.fixture
    def sglang_engine(self, tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
        with serving(tiny_model, tmp_path / "bfloat16.log", dtype="bfloat16") as server:
            yield server

    async def test_a_bfloat16_engine_receives_bfloat16_tensors(self, run: Run) -> None:
        """Half the bytes, and still the trainer's digests."""
        for version, transport in enumerate(TRANSPORTS, 1):
            policy = run.policy(version)
            made = run.write(version, policy, torch.bfloat16)
            event = await asyncio.to_thread(run.publish, version, made, transport=transport)
            assert event["transport"] == {run.engine: REPORTED[transport]}
            assert event["verified"][run.engine] > 5
            whole = sum(p.nbytes for _, p in policy.trainable())
            assert event["bytes"] < 0.52 * whole
            assert gaps(policy, await sampled(run.engine, run.base, 1.0)).mean() < 0.02


@pytest.mark.long
class TestTwoEngines:
    """One of them is the test's own, to be killed."""

    @pytest.fixture
    def others(self, tiny_model: Path, tmp_path: Path) -> Iterator[list[Server]]:
        started = [start(tiny_model, free_port(), tmp_path)]
        yield started
        for server in started:
            server.stop()

    async def test_an_engine_killed_during_a_publish_does_not_stop_the_other(
        self, run: Run, others: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await others[-1].wait_healthy()
        await all_serve(run)
        policy = await self.killed_while_it_receives(run, others[-1], "distributed", monkeypatch, 1)
        others.append(start(run.base, others[-1].spec.port, tmp_path))
        await others[-1].wait_healthy()  # with base weights
        await all_serve(run)
        await serves(run, 2, policy)
        await self.killed_while_it_receives(run, others[-1], "tensor", monkeypatch, 3)

    async def killed_while_it_receives(
        self, run: Run, server: Server, transport: str, monkeypatch: pytest.MonkeyPatch, version: int
    ) -> Policy:
        """A version for both engines, and another one for that which is left."""
        policy = run.policy(version)
        event = await asyncio.to_thread(run.publish, version, run.write(version, policy), transport=transport)
        assert event["transport"] == dict.fromkeys(run.engines, transport)
        await serves(run, version, policy)
        policy, method = run.policy(version + 1), METHODS[transport]
        with monkeypatch.context() as patch:
            patch.setattr(SGLangClient, method, killed_at_the_second(getattr(SGLangClient, method), server))
            made = run.write(version + 1, policy)
            event = await asyncio.to_thread(run.publish, version + 1, made, transport=transport, timeout_s=10)
        assert event["transport"].keys() == {run.engine}
        assert event["verified"][run.engine] > 10
        async with httpx.AsyncClient(base_url=run.url, headers=proxy.RUN) as http:
            assert (await http.get("/api/run")).json()["current_version"] == version + 1
        return policy


def start(model: Path, port: int, folder: Path) -> Server:
    return launch(EngineSpec(model=model, port=port, log_file=folder / "second.log", max_total_tokens=4096))


async def all_serve(run: Run) -> None:
    async with httpx.AsyncClient(base_url=run.url, headers=proxy.RUN) as http, asyncio.timeout(60):
        while True:
            states = [engine["state"] for engine in (await http.get("/api/engines")).json()]
            if states == ["serving"] * len(run.engines):
                return
            await asyncio.sleep(0.2)


def killed_at_the_second(real: Any, server: Server) -> Any:
    """`real`, but at its second call for the server this is killed, the first bucket in it and the others not."""
    calls: list[str] = []

    async def call(client: SGLangClient, *args: Any, **kwargs: Any) -> None:
        calls.append(client.url)
        if calls.count(server.url) == 2 and client.url == server.url:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()
        await real(client, *args, **kwargs)

    return call


def half_sent(real: Any) -> Any:
    """A trainer that goes away in the middle."""

    def run(self: Any) -> None:
        self._buckets = islice(self._buckets, 1)
        self.give_up.set()
        real(self)

    return run


async def test_weights_that_differ_from_the_trainers_do_not_serve(run: Run) -> None:
    """The digests are of other weights than the folder's: an engine with those is wrong."""
    made = run.write(1, run.policy(1))
    other = run.write(2, run.policy(2))
    before = await digests(run)
    said: list[str] = []

    def pause(_: float) -> bool:
        return True

    publisher = Publisher(run.url, "admin-key", pause, said.append, PublishConfig())
    assert not await asyncio.to_thread(publisher.publish, 1, 0, replace(made, digests=other.digests))
    assert "has other weights than the trainer" in said[0]
    async with httpx.AsyncClient(base_url=run.url, headers=proxy.RUN) as http:
        assert (await http.get("/api/run")).json()["current_version"] == 0
    await all_serve(run)
    await serves(run, 0, load_sharded(Policy, run.base, run.world.mesh))
    assert await digests(run) == before


@pytest.mark.parametrize("pause", ["in_place"])
async def test_the_cache_of_older_weights_serves_no_later_call(run: Run) -> None:
    """It is kept for the calls that go on with it."""
    found = [await asyncio.to_thread(ask, run) for _ in range(2)]
    policy = run.policy(1)
    await asyncio.to_thread(run.publish, 1, run.write(1, policy))
    found += [await asyncio.to_thread(ask, run) for _ in range(2)]
    assert [tokens.versions[-1] for _, tokens in found] == [0, 0, 1, 1]
    first, again, renewed, renewed_again = (cached for cached, _ in found)
    assert again > 20
    assert renewed_again > 20
    assert first == renewed == 0
    assert gaps(policy, [tokens for _, tokens in found[2:]]).mean() <= CLOSE


def ask(run: Run) -> tuple[int, TrajectoryTokens]:
    """One call of a session of its own, always the same; how much of its prompt was cached, and its tokens."""
    with httpx.Client(base_url=run.url, headers=proxy.RUN) as http:
        (session,) = http.post("/groups", json={}).json()["sessions"]
        key = {"Authorization": f"Bearer {session['api_key']}"}
        body = {"messages": [{"role": "user", "content": "abcdefghij" * 3}], "max_tokens": 8}
        answer = http.post(f"{session['base_url']}/chat/completions", json=body, headers=key).json()
        usage = answer["usage"]["prompt_tokens_details"] or {}
        (call,) = http.get(f"/sessions/{session['session_id']}/trace").json()["calls"]
    assert not call["kv_mixed"]
    prompt, output = call["prompt_delta_ids"], call["output_ids"]
    ((version, _, _),) = call["version_spans"]
    own = np.arange(len(prompt) + len(output)) >= len(prompt)
    logprobs = np.zeros(len(own), np.float32)
    logprobs[own] = call["logprobs"]
    tokens = TrajectoryTokens(
        trajectory_id="t",
        session_id="s",
        episode_id="s",
        group_id="g",
        input_ids=np.array(prompt + output, np.int32),
        loss_mask=own,
        logprobs=logprobs,
        versions=np.where(own, version, -1).astype(np.int32),
        turn_ids=np.where(own, 0, -1).astype(np.int32),
        temperatures=np.ones(len(own), np.float32),
        turn_returns=np.zeros(1),
        episode_return=0.0,
    )
    return usage.get("cached_tokens", 0), tokens


@pytest.fixture(autouse=True)
def quick_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_broadcast, "JOIN_TIMEOUT_S", 20.0)
