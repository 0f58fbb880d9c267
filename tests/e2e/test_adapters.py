"""Adapters on real SGLang: what it samples by one is what the trainer computes, and a run publishes them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from adapters import write_adapter
from borrowed import proxy_fixtures
from databases import Databases
from peft import PeftModel
from run_records import create_run
from serving import ENGINE_KEY, add_version
from transformers import AutoModelForCausalLM

from agentrl.domain.schemas import Json
from agentrl.engine.chunks import Chunk
from agentrl.engine.server_process import Server, free_port
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.store import Database, events, runs
from agentrl.store.audit import run_audit
from agentrl.testing import END_OF_TURN
from agentrl.versions.weights_folder import ADAPTER, checksum

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
proxy = proxy_fixtures("proxy_fixtures_of_adapters")

CLOSE = 1e-4
"""Mean |recorded − computed| logprob, in float32."""
ASKED = [{"role": "user", "content": "abcd"}]
LONG = 400
"""Tokens of a call that goes on while others are made."""
NEVER = -100.0
"""Bias of a token that shall not be sampled."""


def gap(base: Path, adapter: Path | None, call: Json) -> float:
    """Mean |recorded − computed| logprob of a call that began its session; peft computes."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    prompt, output = call["prompt_delta_ids"], call["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logits[:, END_OF_TURN] += NEVER
    computed = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].numpy()
    return float(np.abs(computed - np.array(call["logprobs"])).mean())


class Gate:
    """Holds a call of LONG tokens after the first tokens that the engine sent of it, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._generate = SGLangClient.generate

    async def generate(self, client: SGLangClient, **asked: Any) -> AsyncIterator[Chunk]:
        """In the place of the client's method: `client` is in a proxy of another thread."""
        async with aclosing(self._generate(client, **asked)) as chunks:
            async for chunk in chunks:
                yield chunk
                if asked["sampling_params"]["max_new_tokens"] == LONG:
                    self.reached.set()
                    await asyncio.to_thread(self.opened.wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(SGLangClient, "generate", lambda client, **asked: made.generate(client, **asked))
    yield made
    made.opened.set()


class Versions:
    """A run whose versions are adapters that somebody trained."""

    def __init__(self, url: str, database: Database, run_id: str, base: Path, folder: Path) -> None:
        self.http = httpx.AsyncClient(base_url=url, headers=proxy.RUN, timeout=120)
        self.database, self.run_id, self.base, self.folder = database, run_id, base, folder
        self.paths: dict[int, Path | None] = {0: None}

    async def publish(self, version: int, **settings: Any) -> float:
        """Make a version, and publish it; returns the seconds that it took the engine."""
        path = self.paths[version] = write_adapter(
            self.folder / f"v{version}-step", self.base, seed=version, **settings
        )
        add_version(self.database, self.run_id, version, path, checksum(path / ADAPTER))
        published = await self.http.post("/admin/publish", json={"version": version}, headers=proxy.ADMIN)
        (seconds,) = published.raise_for_status().json()["stall_s"].values()
        return float(seconds)

    async def call(self, **settings: Any) -> Json:
        """One call in a session of its own, as it was recorded."""
        opened = (await self.http.post("/sessions", json={})).raise_for_status().json()
        root = f"/sessions/{opened['session_id']}"
        body = {"messages": ASKED, "max_tokens": 48, "logit_bias": {END_OF_TURN: NEVER}, **settings}
        (await self.http.post(f"{root}/v1/chat/completions", json=body)).raise_for_status()
        (call,) = (await self.http.get(f"{root}/trace")).raise_for_status().json()["calls"]
        return dict(call)


@pytest.fixture
def config(tiny_model: Path) -> Json:
    return {
        "name": "test",
        "model": str(tiny_model),
        "agent": "a:B",
        "tasks": "t.jsonl",
        "steps": 4,
        "rollout": {"group_size": 1, "min_group_size": 1},
        "trainer": {"groups_per_step": 64, "lora": {"rank": 8, "publish": "adapter"}},
    }


async def test_calls_keep_the_version_that_they_began_with_and_the_trainer_agrees_on_every_one(
    sglang_for_adapters: Server, tiny_model: Path, databases: Databases, config: Json, tmp_path: Path, gate: Gate
) -> None:
    with databases.lent("sqlite") as url:
        database = Database(url)
        with database.write() as conn:
            run_id = create_run(conn, config=config, base_model=tiny_model, steps=4)
        port = free_port()
        with proxy.serve_proxy(url, [sglang_for_adapters.url], port, key=ENGINE_KEY):
            run = Versions(f"http://127.0.0.1:{port}", database, run_id, tiny_model, tmp_path)
            calls = [await run.call()]
            await run.publish(1, rank=8)
            long = asyncio.create_task(run.call(max_tokens=LONG))
            assert await asyncio.to_thread(gate.reached.wait, 120)
            await run.publish(2, rank=4, targets=["q_proj", "down_proj", "up_proj"])
            calls.append(await run.call())
            assert not long.done()
            gate.opened.set()
            calls.append(await long)
            await run.http.aclose()
        database.close()
    assert [call["version_spans"] for call in calls] == [[[0, 0, 48]], [[2, 0, 48]], [[1, 0, LONG]]]
    for call in calls:
        version = call["version_spans"][0][0]
        assert gap(tiny_model, run.paths[version], call) <= CLOSE
        if version:
            assert gap(tiny_model, None, call) > 100 * CLOSE


CONFIG = """
name: adapters
model: tiny
agent: agentrl.agents.reverse:ReverseAgent
tasks: agentrl.agents.reverse:train_tasks
steps: 5
rollout: {group_size: 4, max_concurrent_groups: 8}
trainer:
  groups_per_step: 4
  max_staleness: 1
  lr: 1.0e-3
  lora: {rank: 4, targets: [q_proj, o_proj, up_proj], publish: adapter}
"""


def test_a_run_publishes_its_adapters_and_resumes(sglang_for_adapters: Server, tmp_path: Path) -> None:
    """With an engine of its own, then with one that has other versions' adapters."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    folder = tmp_path / "runs" / "adapters"
    env = {name: value for name, value in os.environ.items() if name != "AGENTRL_DATABASE_URL"}
    env["AGENTRL_ENGINE_KEY"] = ENGINE_KEY  # of the second; the first has one of its own
    shared = sglang_for_adapters.spec.log_file
    before = len(shared.read_text())
    for changes in (["steps=3"], ["steps=5", f"engine.urls=[{sglang_for_adapters.url}]"]):
        command = [sys.executable, "-m", "agentrl", "train", "config.yaml", *changes]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["max_staleness_seen"] <= 1
    assert summary["logprob_mismatch_mean_abs"] < CLOSE
    database = Database(f"sqlite:///{folder}/agentrl.db")
    with database.read() as conn:
        run = runs.by_name(conn, "adapters")
        assert list(run_audit.scan(conn, run.id)) == []
        published = [event.data["version"] for event in events.of_run(conn, run.id, "publish")]
    database.close()
    assert {1, 2, 3, 4, 5} <= set(published)
    log = (folder / "logs" / "engine-0.log").read_text() + shared.read_text()[before:]
    asked = Counter(line.split('"POST ')[1].split()[0] for line in log.splitlines() if '"POST ' in line)
    assert asked["/load_lora_adapter"] >= 5
    assert not asked.keys() & {"/pause_generation", "/update_weights_from_disk"}
    assert all((path / ADAPTER).is_file() for path in (folder / "weights").iterdir())
    whole = (folder / "model" / "model.safetensors").stat().st_size
    assert max((path / ADAPTER).stat().st_size for path in (folder / "weights").iterdir()) < whole / 5
