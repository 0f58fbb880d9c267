"""What a real SGLang server records of its samples is what the trainer computes for the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from borrowed import proxy_fixtures
from databases import Databases
from run_records import create_run
from sampling import ASKED, CLOSE, gaps, sampled
from serving import serving
from sqlalchemy import select

from agentrl.domain.schemas import TrajectoryTokens
from agentrl.engine.server_process import Server, free_port
from agentrl.store import Database
from agentrl.store.tables import trajectories as trajectory_rows
from agentrl.store.training import trajectories
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.engine
proxy = proxy_fixtures("proxy_fixtures_of_distribution")

TEMPERATURE = 0.7


@pytest.fixture
def mesh(world: World) -> Mesh:
    return world.mesh


async def play(url: str, database: Database) -> tuple[list[TrajectoryTokens], list[tuple[bool, bool]]]:
    """Sessions of two calls, the second with top-p 0.9; their trajectories, and per call (trainable, modified)."""
    calls = []
    async with httpx.AsyncClient(base_url=url, headers=proxy.RUN, timeout=120) as http:
        for asked in ASKED:
            opened = (await http.post("/sessions", json={})).raise_for_status().json()
            async with openai.AsyncOpenAI(
                base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0
            ) as client:
                messages: list[Any] = [{"role": "user", "content": asked}]
                for top_p in (1.0, 0.9):
                    reply = await client.chat.completions.create(
                        model="default", messages=messages, temperature=TEMPERATURE, top_p=top_p, max_tokens=48
                    )
                    answer = {"role": "assistant", "content": reply.choices[0].message.content}
                    messages += [answer, {"role": "user", "content": "And now another one."}]
            root = f"/sessions/{opened['session_id']}"
            (await http.post(f"{root}/reward", json={"value": 1.0})).raise_for_status()
            (await http.post(f"{root}/end", json={})).raise_for_status()
            trace = (await http.get(f"{root}/trace")).raise_for_status().json()
            calls += [(call["trainable"], call["distribution_modified"]) for call in trace["calls"]]
    with database.read() as conn:
        built = list(conn.execute(select(trajectory_rows.c.id)).scalars())
        return trajectories.load(conn, built, ages={0: 0}, discount=1.0).trajectories, calls


async def test_the_temperature_is_honoured_and_another_distribution_kept_out_of_the_loss(
    sglang_engine: Server, tiny_model: Path, databases: Databases, mesh: Mesh
) -> None:
    config = {
        "name": "test",
        "model": str(tiny_model),
        "agent": "a:B",
        "tasks": "t.jsonl",
        "steps": 1,
        "rollout": {"group_size": 1, "min_group_size": 1, "sampling": {"temperature": TEMPERATURE}},
        "trainer": {"groups_per_step": 64},
    }
    with databases.lent("sqlite") as url:
        database = Database(url)
        with database.write() as conn:
            create_run(conn, config=config, base_model=tiny_model)
        port = free_port()
        with proxy.serve_proxy(url, [sglang_engine.url], port):
            found, calls = await play(f"http://127.0.0.1:{port}", database)
        database.close()
    assert calls == [(True, False), (False, True)] * len(ASKED)
    assert len(found) == len(ASKED)
    for t in found:
        np.testing.assert_array_equal(t.loss_mask, t.turn_ids == 0)
        np.testing.assert_array_equal(t.temperatures[t.turn_ids >= 0], np.float32(TEMPERATURE))
    assert gaps(load_sharded(Policy, tiny_model, mesh), found).mean() <= CLOSE
    at_one = [replace(t, temperatures=np.ones_like(t.temperatures)) for t in found]
    assert gaps(load_sharded(Policy, tiny_model, mesh), at_one).mean() > 100 * CLOSE
    second = [replace(t, loss_mask=t.turn_ids == 1) for t in found]  # recorded before top-p: no ratio of 1 / 0.9
    assert gaps(load_sharded(Policy, tiny_model, mesh), second).mean() <= CLOSE


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
async def test_logprobs_of_the_demo_model(
    demo_server: Server, smollm2_model: Path, mesh: Mesh, temperature: float
) -> None:
    found = await sampled(demo_server.url, smollm2_model, temperature)
    assert gaps(load_sharded(Policy, smollm2_model, mesh), found).mean() <= CLOSE


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
async def test_logprobs_of_the_tiny_model(
    sglang_engine: Server, tiny_model: Path, mesh: Mesh, temperature: float
) -> None:
    found = await sampled(sglang_engine.url, tiny_model, temperature)
    assert gaps(load_sharded(Policy, tiny_model, mesh), found).mean() <= CLOSE


@pytest.fixture(scope="module")
def demo_server(smollm2_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own for the demo model."""
    log_file = tmp_path_factory.mktemp("demo") / "engine.log"
    with serving(smollm2_model, log_file) as server:
        yield server
