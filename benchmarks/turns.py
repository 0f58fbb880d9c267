"""Measures the cost of each turn as a conversation grows: CPU of the proxy and bytes in the store.

    python benchmarks/turns.py --out benchmarks/results/turns.json

Agents make calls in lockstep to a proxy in front of a fake engine that answers at once. Every turn adds 1,600 tokens of
SmolLM2's vocabulary, 64 of them sampled; the conversation has 32,000 tokens at the 20th turn. A figure is the proxy's
CPU time for one turn of all agents, divided by the number of agents: the median over conversations. `chatml` renders
with our ChatML, `template` bridges over the model's own chat template. With `chat`, whole or streamed, an agent sends
its whole conversation each time; with `responses` it sends only the new messages, with `previous_response_id`.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import harness
import sqlalchemy as sa
from proxied import RUN, cpu_s, start_proxy, until_healthy

from agentrl.engine.server_process import free_port
from agentrl.models import resolve_model
from agentrl.rendering import load_renderer
from agentrl.store import Database
from agentrl.store.tables import interaction_data, interactions
from agentrl.testing import FakeEngine

TURNS = 20
TOKENS_A_TURN = 1600
SAMPLED = 64
WORDS = ["the", "result", "of", "this", "call", "shows", "that", "three", "files", "were", "found", "in", "folder"]
CONTEXT = 65_536


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 5, "conversations of each agent"), agents=(int, 16, "agents that talk at once")
    )
    report = harness.Report("turns")
    with tempfile.TemporaryDirectory() as folder:
        for renderer in ("chatml", "template"):
            model = long_model(Path(folder) / renderer, renderer)
            run = Path(folder) / f"{renderer}.run"
            run.mkdir()
            asyncio.run(measure(report, run, model, renderer, options))
    harness.finish(report, options.out)


def long_model(path: Path, renderer: str) -> Path:
    """Make a folder with SmolLM2's tokenizer and template and a longer context, without weights."""
    source = resolve_model("smollm2")
    path.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    (path / "renderer.json").write_text(json.dumps({"renderer": renderer}))
    return path


async def measure(report: harness.Report, folder: Path, model: Path, name: str, options: Any) -> None:
    """Measure the CPU of each turn, whole and streamed, and the bytes of its rows."""
    written = load_renderer(model)
    words = len(written.encode(" ".join(WORDS * 100))) / len(WORDS * 100)  # tokens per word
    answer = written.encode(" " + " ".join(WORDS * 10))[: SAMPLED - 1] + written.stop_token_ids[:1]
    per_turn = round((TOKENS_A_TURN - SAMPLED) / words)
    samples: dict[str, dict[int, list[float]]] = {api: {} for api in ("chat", "chat_stream", "responses")}
    port = free_port()
    with FakeEngine(lambda ids, params: answer, context_length=CONTEXT) as engine:
        url, proxy = f"http://127.0.0.1:{port}", start_proxy(folder, [engine.url], port, model)
        try:
            async with aiohttp.ClientSession() as http:
                await until_healthy(http, url, proxy)
                for round_ in range(options.rounds + 1):
                    for api, turns in samples.items():
                        costs = await conversation(http, url, proxy, options.agents, per_turn, api)
                        for turn, cost in enumerate(costs, start=1):
                            if round_:  # the first round warms up
                                turns.setdefault(turn, []).append(cost)
        finally:
            proxy.terminate()
            proxy.wait(20)
    for api, turns in samples.items():
        named = {str(turn * TOKENS_A_TURN): turns[turn] for turn in (2, 5, 10, 20)}
        report.compare(f"turn_cost/{name}/{api}", named, "ms", base=str(2 * TOKENS_A_TURN))
    sizes = bytes_by_turn(folder)
    report.compare(
        f"turn_bytes/{name}", {str(t * TOKENS_A_TURN): sizes[t] for t in (2, 20)}, "B", base=str(2 * TOKENS_A_TURN)
    )


async def conversation(
    http: aiohttp.ClientSession, url: str, proxy: subprocess.Popen[bytes], agents: int, words: int, api: str
) -> list[float]:
    """Hold one conversation per agent; returns the proxy's CPU milliseconds per agent, for every turn."""
    opened = []
    for _ in range(agents):
        async with http.post(f"{url}/groups", json={"is_eval": True, "task": {}}, headers=RUN) as answer:
            opened.append((await answer.json())["sessions"][0])
    histories: list[list[dict[str, Any]]] = [[] for _ in opened]
    rng, costs = random.Random(0), []

    async def turn(session: dict[str, Any], history: list[dict[str, Any]]) -> None:
        said = " ".join(rng.choices(WORDS, k=words))
        history.append({"role": "user", "content": said})
        path, body = "chat/completions", {"messages": history, "max_tokens": SAMPLED, "stream": api == "chat_stream"}
        if api == "responses":
            path, body = "responses", {"input": said, "max_output_tokens": SAMPLED}
            body |= {"previous_response_id": session["last"]} if "last" in session else {}
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        async with http.post(f"{session['base_url']}/{path}", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            raw = await answer.read()
        if api == "responses":
            session["last"] = json.loads(raw)["id"]
        else:
            history.append({"role": "assistant", "content": text_of(raw, stream=api == "chat_stream")})

    for _ in range(TURNS):
        before = cpu_s(proxy.pid)
        await asyncio.gather(*(turn(session, history) for session, history in zip(opened, histories, strict=True)))
        after = cpu_s(proxy.pid)
        costs.append(1000 * (after - before) / agents)
    return costs


def text_of(raw: bytes, stream: bool) -> str:
    """The text of an answer."""
    if not stream:
        return str(json.loads(raw)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def bytes_by_turn(folder: Path) -> dict[int, list[float]]:
    """Bytes of the bulk columns of every call, by its turn. Every call but the first must extend another."""
    database = Database(f"sqlite:///{folder}/bench.db")
    data = interaction_data.c
    columns = (data.new_messages, data.answer, data.prompt_delta_ids, data.output_ids, data.logprobs)
    sizes: dict[int, list[float]] = {}
    with database.read() as conn:
        rows = conn.execute(
            sa.select(interactions.c.messages, interactions.c.bridged, *(sa.func.length(c) for c in columns)).join(
                interaction_data, data.interaction_id == interactions.c.id
            )
        ).all()
    database.close()
    for messages, bridged, *lengths in rows:
        assert bridged == (messages > 2), "a turn forked"
        sizes.setdefault(messages // 2, []).append(sum(lengths))
    return sizes


if __name__ == "__main__":
    main()
