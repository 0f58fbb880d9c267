"""Kills the proxy's workers under load, on both databases: no delivered answer may be missing, none sampled twice.

    python benchmarks/kill_proxy.py --kills 20 --out benchmarks/results/kill_proxy.json

For each database, a real `agentrl proxy --workers N` serves agents that use the openai SDK with its own retries. Half
of the agents ask for whole answers. The other half stream; the SDK does not retry streams, so these agents ask again
with the same `Idempotency-Key`. Every answer of the fake engine is random, so an answer that is sampled twice differs.
A random worker is killed `--kills` times, each time after every agent has made progress since the last kill. Then the
answers that the agents noted are compared with the store. PostgreSQL is the server of AGENTRL_TEST_POSTGRES_URL, else
the local one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import crash
import harness
import httpx
import openai
import psutil
import sqlalchemy as sa
from proxied import RUN, create_run, until_healthy

from agentrl.engine.server_process import free_port
from agentrl.models import resolve_model
from agentrl.rendering import Renderer, load_renderer
from agentrl.store import Database
from agentrl.store.audit import run_audit
from agentrl.store.calls import conversations
from agentrl.store.tables import interactions
from agentrl.testing import FakeEngine

TOKENS = 24
TOKEN_DELAY_S = 0.01
LONGEST = 24
"""Number of messages after which an agent begins a new conversation."""
MAX_RETRIES = 8
STUCK_S = 90.0
LOST = ("missing", "changed", "twice", "failed_turns", "violations")
"""The counts that must be 0."""


@dataclass
class Agent:
    """One session and the notes of its agent."""

    index: int
    session: dict[str, Any]
    stream: bool
    delivered: dict[str, str] = field(default_factory=dict)  # call id → text of an answer that was received to its end
    retried: set[str] = field(default_factory=set)  # calls whose answer a retry received
    breaks: int = 0  # streams that broke off
    failures: list[str] = field(default_factory=list)
    last_was_retry: bool = False


def main() -> None:
    """Do the runs, print a table, write JSON; exits with status 1 when anything was lost."""
    options = harness.arguments(
        __doc__,
        kills=(int, 20, "kills on each database"),
        workers=(int, 3, "processes of the proxy"),
        agents=(int, 16, "agents that talk at once"),
        seed=(int, 0, "of victims and moments"),
        database=(str, "both", "sqlite, postgresql or both"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kinds = crash.DATABASES if options.database == "both" else (options.database,)
    report = harness.Report("kill_proxy")
    report.notes |= {"workers": options.workers, "agents": options.agents, "seed": options.seed}
    if "postgresql" in kinds:
        report.notes["postgresql"] = crash.postgres_version()
    lost = 0
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder, crash.new_database(kind, Path(folder)) as (url, _):
            figures, recovery_s = asyncio.run(one_run(Path(folder), url, options))
        for name, count in figures.items():
            report.figures.append(harness.Figure(f"{name}/{kind}", count, "count", None, None, count, count, 1))
        report.add(f"recovery/{kind}", recovery_s, "s")
        lost += sum(figures[name] for name in LOST)
    harness.finish(report, options.out)
    if lost:
        raise SystemExit(1)


async def one_run(folder: Path, url: str, options: Any) -> tuple[dict[str, int], list[float]]:
    """Run one database; returns its counts, and for each kill the seconds until the worker served again."""
    model = resolve_model("tiny")
    renderer = load_renderer(model)
    rng = random.Random(options.seed)
    database = Database(url)
    database.upgrade()
    run_id = create_run(database, model)
    port = free_port()
    with FakeEngine(answers(renderer), token_delay_s=TOKEN_DELAY_S) as engine:
        proxy = start(folder, url, engine.url, port, options.workers)
        try:
            agents, recovery_s = await disturbed(proxy, f"http://127.0.0.1:{port}", folder, options, rng)
        finally:
            proxy.terminate()
            with suppress(subprocess.TimeoutExpired):
                proxy.wait(30)
            proxy.kill()
    try:
        return compare(database, run_id, agents, len(recovery_s)), recovery_s
    finally:
        database.close()


def answers(renderer: Renderer) -> Callable[[list[int], Any], list[int]]:
    """A function that answers any prompt with new random tokens."""
    words = ["red", "green", "blue", "one", "two", "three", "four", "five", "north", "south", "east", "west"]

    def respond(_: list[int], __: Any) -> list[int]:
        return renderer.encode(" ".join(random.choices(words, k=TOKENS)))[:TOKENS] + renderer.stop_token_ids[:1]

    return respond


def start(folder: Path, url: str, engine_url: str, port: int, workers: int) -> subprocess.Popen[bytes]:
    """Start `agentrl proxy`."""
    argv = ["proxy", "--run", "bench", "--engine", engine_url, "--port", str(port), "--workers", str(workers)]
    env = os.environ | {"AGENTRL_DATABASE_URL": url, "AGENTRL_ADMIN_KEY": "admin-key"}
    with (folder / "proxy.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "agentrl", *argv], env=env, stdout=log, stderr=log)


async def disturbed(
    proxy: subprocess.Popen[bytes], url: str, folder: Path, options: Any, rng: random.Random
) -> tuple[list[Agent], list[float]]:
    """Kill workers while agents make calls; returns the agents with their notes, and how long each worker was away."""
    agents: list[Agent] = []
    recovery_s: list[float] = []
    async with aiohttp.ClientSession() as http:
        await until_healthy(http, url, proxy)
        for index in range(options.agents):
            async with http.post(f"{url}/groups", json={"is_eval": True, "task": {}}, headers=RUN) as answer:
                session = (await answer.json())["sessions"][0]
            agents.append(Agent(index, session, stream=index % 2 == 1))
    log = folder / "proxy.log"
    await until(lambda: log.read_text().count(" serves (") == options.workers, log)
    ended = asyncio.Event()
    talking = [asyncio.create_task(talk(agent, ended)) for agent in agents]
    try:
        for kill in range(options.kills):
            before = [len(agent.delivered) for agent in agents]
            await until(lambda b=before: all(len(a.delivered) > n for a, n in zip(agents, b, strict=True)), log)
            await asyncio.sleep(rng.uniform(0, 2 * TOKENS * TOKEN_DELAY_S))  # a random moment within a call
            victim = rng.choice(worker_pids(proxy.pid))
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            await until(lambda n=options.workers + kill + 1: log.read_text().count(" serves (") >= n, log)
            recovery_s.append(time.monotonic() - killed)
        before = [len(agent.delivered) for agent in agents]
        await until(lambda: all(len(a.delivered) > n + 1 for a, n in zip(agents, before, strict=True)), log)
    finally:
        ended.set()
        await asyncio.wait(talking, timeout=60)
    return agents, recovery_s


async def until(condition: Callable[[], bool], log: Path) -> None:
    """Wait until `condition` holds; ends the benchmark when it does not come to hold in time."""
    deadline = time.monotonic() + STUCK_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"stuck; the proxy's log ends with:\n{_tail(log)}")
        await asyncio.sleep(0.02)


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


def worker_pids(parent: int) -> list[int]:
    """The process ids of the running workers."""
    return [c.pid for c in psutil.Process(parent).children() if "agentrl.proxy.serving.replica" in c.cmdline()]


async def talk(agent: Agent, ended: asyncio.Event) -> None:
    """Hold one conversation after another until `ended` is set."""

    async def sent(request: httpx.Request) -> None:
        agent.last_was_retry = request.headers.get("x-stainless-retry-count", "0") != "0"

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [sent]})
    messages: list[Any] = []
    async with openai.AsyncOpenAI(
        base_url=agent.session["base_url"], api_key=agent.session["api_key"], max_retries=MAX_RETRIES, http_client=http
    ) as client:
        turn = 0
        while not ended.is_set():
            turn += 1
            messages.append({"role": "user", "content": f"agent {agent.index}, turn {turn}"})
            try:
                text = await (
                    streamed(agent, client, messages, turn) if agent.stream else whole(agent, client, messages)
                )
            except openai.OpenAIError as error:
                agent.failures.append(f"turn {turn}: {error}")
                return
            messages = [*messages, {"role": "assistant", "content": text}] if len(messages) < LONGEST else []


async def whole(agent: Agent, client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    """Get one whole answer; the SDK retries by itself."""
    answer = await client.chat.completions.create(model="default", messages=messages)
    return note(agent, answer.id, answer.choices[0].message.content or "", agent.last_was_retry)


async def streamed(agent: Agent, client: openai.AsyncOpenAI, messages: list[Any], turn: int) -> str:
    """Get one streamed answer; asks again, from the start, until the end of the stream has arrived."""
    key = {"Idempotency-Key": f"{agent.index}-{turn}"}
    for attempt in range(MAX_RETRIES + 1):
        text, reason, call_id = "", None, ""
        try:
            stream = await client.chat.completions.create(
                model="default", messages=messages, stream=True, extra_headers=key
            )
            async for chunk in stream:
                call_id = chunk.id
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
        except (httpx.TransportError, openai.APIConnectionError):
            reason = None
        if reason is not None:
            return note(agent, call_id, text, attempt > 0 or agent.last_was_retry)
        agent.breaks += 1
    raise openai.OpenAIError("the stream broke off again and again")


def note(agent: Agent, completion_id: str, text: str, retried: bool) -> str:
    """Note an answer that has arrived to its end."""
    call_id = completion_id.removeprefix("chatcmpl-")
    agent.delivered[call_id] = text
    if retried:
        agent.retried.add(call_id)
    return text


def compare(database: Database, run_id: str, agents: list[Agent], kills: int) -> dict[str, int]:
    """Compare the agents' notes with the store; returns counts."""
    counts: Counter[str] = Counter()
    for agent in agents:
        with database.read() as conn:
            c = interactions.c
            rows = conn.execute(
                sa.select(c.id, c.status, c.digest, c.created_at, c.finished_at)
                .where(c.session_id == agent.session["session_id"])
                .order_by(c.id)
            ).all()
            stored = conversations.of_session(conn, agent.session["session_id"])
        complete = {row.id for row in rows if row.status == "complete"}
        counts["missing"] += len(agent.delivered.keys() - complete)
        counts["changed"] += sum(
            call_id in stored and stored[call_id].all[-1].get("content") != text
            for call_id, text in agent.delivered.items()
        )
        counts["delivered"] += len(agent.delivered)
        counts["answers_to_retries"] += len(agent.retried)
        counts["broken_streams"] += agent.breaks
        counts["failed_turns"] += len(agent.failures)
        counts["calls_lost"] += sum(row.status == "lost" for row in rows)
        asked = defaultdict(list)
        for row in rows:
            asked[row.digest].append(row)
        for calls in asked.values():
            first = next((row for row in calls if row.status == "complete"), None)
            # A call that began before the first was complete could not get its answer: only later calls count.
            later = [row for row in calls if first is not None and row.created_at > first.finished_at]
            counts["twice"] += len(later)
            counts["sampled_again"] += len(calls) - 1
            counts["claimed"] += sum(row.id in agent.retried for row in calls[:1])
    with database.read() as conn:
        violations = list(run_audit.scan(conn, run_id))
    for line in [*violations, *(f"agent {agent.index}, {line}" for agent in agents for line in agent.failures)]:
        print(line, file=sys.stderr)
    names = (*LOST, "delivered", "answers_to_retries", "claimed", "sampled_again", "calls_lost", "broken_streams")
    return {"kills": kills} | {name: counts[name] for name in names} | {"violations": len(violations)}


if __name__ == "__main__":
    main()
