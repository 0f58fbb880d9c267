"""Publishing to real SGLang by every transport: what it serves then is what the trainer has, whatever went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import torch
from borrowed import proxy_fixtures
from databases import Databases
from sampling import CLOSE, gaps, sampled
from serving import add_version

from agentrl.config import LoraConfig, PublishConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.server import Server, free_port
from agentrl.schemas import Json
from agentrl.store import Database, events, runs
from agentrl.trainer import publish, transfer, weights
from agentrl.trainer.distributed import World
from agentrl.trainer.policy import Policy
from agentrl.trainer.publish import Publisher
from agentrl.trainer.sharding import load_policy
from agentrl.trainer.weights import Published

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
proxy = proxy_fixtures("proxy_fixtures_of_publish")
TRANSPORTS = ("disk", "distributed", "tensor")


@dataclass
class Run:
    """A run of the tiny model, a proxy before the real engine, and a trainer's weights."""

    url: str
    engine: str
    database: Database
    run_id: str
    base: Path
    folder: Path
    world: World
    said: list[str] = field(default_factory=list)

    def policy(self, seed: int) -> Policy:
        """The base model, moved."""
        policy = load_policy(self.base, self.world.mesh)
        torch.manual_seed(seed)
        with torch.no_grad():
            for _, p in policy.trainable():
                p.add_(torch.randn_like(p), alpha=0.02)
        return policy

    def write(self, version: int, policy: Policy) -> Published:
        """As the trainer does once a step is durable."""
        trained = weights.trainable(policy, self.world)
        made = weights.publishable(self.folder / f"v{version}-s", trained, self.base, policy.names, LoraConfig())
        add_version(self.database, self.run_id, version, made.path, made.checksum)
        return made

    def publish(self, version: int, made: Published, **settings: Any) -> Json:
        """By the trainer's publisher; the event of it."""
        config = PublishConfig(**{"bucket_bytes": 300_000, "timeout_s": 20} | settings)
        publisher = Publisher(self.url, "admin-key", lambda _: False, self.said.append, config, compares=True)
        assert publisher.publish(version, 0, made.tensors)
        *_, last = self.database.query(events.of_run, self.run_id, "publish")
        return last.data


@pytest.fixture
async def run(
    sglang_engine: Server, tiny_model: Path, databases: Databases, tmp_path: Path, world: World
) -> AsyncIterator[Run]:
    config = {
        "name": "test", "model": str(tiny_model), "agent": "a:B", "tasks": "t.jsonl", "steps": 9,
        "rollout": {"group_size": 1, "min_group_size": 1},
    }  # fmt: skip
    with databases.lent("sqlite") as url:
        database = Database(url)
        run_id = database.transact(
            lambda conn: runs.create(
                conn, name="test", config=config, task_data=[{}], base_model=str(tiny_model), key="run-key", seed=0,
                steps=9,
            )
        )  # fmt: skip
        port = free_port()
        with proxy.serve_proxy(url, [sglang_engine.url], port):
            yield Run(f"http://127.0.0.1:{port}", sglang_engine.url, database, run_id, tiny_model, tmp_path, world)
        database.close()


async def serves(run: Run, version: int, policy: Policy) -> None:
    """The engine reports the version, and scores by these weights."""
    async with aiohttp.ClientSession() as http:
        client = EngineClient(run.engine, http)
        assert (await client.model_info()).weight_version == version
        assert not await client.paused()
    assert gaps(policy, await sampled(run.engine, run.base, 1.0)).mean() <= CLOSE


async def digests(run: Run) -> dict[str, str]:
    async with aiohttp.ClientSession() as http:
        (found,) = await EngineClient(run.engine, http).checksums()
    return found


async def test_every_transport_leaves_the_trainers_weights(run: Run) -> None:
    found = []
    policies = {transport: run.policy(seed) for seed, transport in enumerate(TRANSPORTS)}
    policies["again"] = policies["disk"]
    for version, (transport, policy) in enumerate(policies.items(), 1):
        by = transport if transport in TRANSPORTS else "distributed"
        made = run.write(version, policy)
        event = await asyncio.to_thread(run.publish, version, made, transport=by)
        assert event["transport"] == {run.engine: by}
        assert event["verified"][run.engine] > 10
        assert event["bytes"] == sum(t.nbytes for t in made.tensors.values()) > 2 * 300_000
        await serves(run, version, policy)
        found.append(await digests(run))
    assert found[0] == found[3]  # the same weights by two ways
    assert found[0] != found[1] != found[2]
    assert run.said == []


async def test_what_cannot_be_sent_is_read_from_the_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = run.policy(1)
    made = run.write(1, policy)
    monkeypatch.setattr(transfer._Sender, "run", half_sent(transfer._Sender.run))
    event = await asyncio.to_thread(run.publish, 1, made, transport="distributed", timeout_s=3)
    assert event["transport"] == {run.engine: "disk"}
    assert event["verified"][run.engine] > 10
    await serves(run, 1, policy)
    monkeypatch.undo()
    policy = run.policy(2)
    event = await asyncio.to_thread(run.publish, 2, run.write(2, policy), transport="distributed")
    assert event["transport"] == {run.engine: "distributed"}
    await serves(run, 2, policy)


def half_sent(real: Any) -> Any:
    """A trainer that goes away in the middle."""

    def run(self: Any) -> None:
        self._buckets = self._buckets[:1]
        self.give_up.set()
        real(self)

    return run


async def test_weights_that_differ_from_the_trainers_do_not_serve(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are of other weights than the folder's: an engine with those is wrong."""
    made = run.write(1, run.policy(1))
    other = transfer.digests(weights.trainable(run.policy(2), run.world))
    monkeypatch.setattr(publish, "digests", lambda _: other)
    said: list[str] = []

    def pause(_: float) -> bool:
        return True

    publisher = Publisher(run.url, "admin-key", pause, said.append, PublishConfig(), compares=True)
    assert not await asyncio.to_thread(publisher.publish, 1, 0, made.tensors)
    assert "has other weights than the trainer" in said[0]
    async with httpx.AsyncClient(base_url=run.url, headers=proxy.RUN) as http:
        assert (await http.get("/api/run")).json()["current_version"] == 0


@pytest.fixture(autouse=True)
def quick_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "JOIN_TIMEOUT_S", 20.0)
