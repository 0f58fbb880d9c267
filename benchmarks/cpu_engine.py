"""Measures how fast an engine on a CPU samples, and how much of the CPU it needs.

    python benchmarks/cpu_engine.py --out benchmarks/results/cpu_engine.json --before FOLDER

Each variant is one real SGLang server of SmolLM2-135M; they take turns. N calls of different prompts run at once.

- `tokens_per_s/N/VARIANT`: tokens that N calls got, by the time until the last one ended.
- `cpu_ms_per_token/N/VARIANT`: CPU time of the server's processes, by tokens.
- `next_turn_ms/VARIANT`: the time to the first token of a call whose prompt is the last call's --cached tokens and 20
  new ones.
- `logprob_difference`: the largest difference between the variants' logprobs of the same tokens, sampled greedily.

VARIANT is `after`, this commit, or `before`, the package in the folder `--before`: a checkout of an earlier commit in
which `make setup` was run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import harness
import psutil

from agentrl.domain.schemas import Json
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.server_process import free_port
from agentrl.engine.sglang.sglang_client import SGLangClient

ROOT = Path(__file__).resolve().parent.parent
START_S = 300
VOCABULARY = 40_000
PROMPT_TOKENS = 100
NEW_TOKENS = 32
TURN_TOKENS = 20
KEY = "benchmark-key"


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        rounds=(int, 3, "rounds of each figure"),
        calls=(str, "1,8,32,64", "calls at once"),
        cached=(int, 500, "tokens of the call before"),
        model=(str, "smollm2", "the model"),
        before=(str, "", "folder of an earlier commit"),
    )
    report = harness.Report("cpu_engine")
    packages = ({"before": Path(options.before)} if options.before else {}) | {"after": ROOT}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            variant: stack.enter_context(served(package, options.model, folder / f"{variant}.log"))
            for variant, package in packages.items()
        }
        asyncio.run(measure(report, servers, options))
    harness.finish(report, options.out)


async def measure(report: harness.Report, servers: dict[str, Server], options: argparse.Namespace) -> None:
    """All figures."""
    async with aiohttp.ClientSession() as http:
        with ExitStack() as stack:
            clients = {
                variant: stack.enter_context(closing(SGLangClient(server.url, http, key=KEY)))
                for variant, server in servers.items()
            }
            await asyncio.gather(*(serving(client) for client in clients.values()))
            for count in map(int, options.calls.split(",")):
                await measure_calls(report, clients, servers, count, options.rounds)
            await measure_turns(report, clients, options.cached, options.rounds)
            if len(clients) > 1:
                report.add("logprob_difference", [await difference(list(clients.values()))], "nats")


async def measure_calls(
    report: harness.Report, clients: dict[str, SGLangClient], servers: dict[str, Server], count: int, rounds: int
) -> None:
    """The speed of `count` calls at once. The first round warms the servers up."""
    speed: dict[str, list[float]] = {variant: [] for variant in clients}
    cpu: dict[str, list[float]] = {variant: [] for variant in clients}
    n_tokens = count * NEW_TOKENS
    for round_ in range(-1, rounds):
        prompts = [prompt_of(PROMPT_TOKENS, f"{count} {round_} {call}") for call in range(count)]
        for variant, client in clients.items():
            began, used = time.monotonic(), servers[variant].cpu_s()
            await asyncio.gather(*(answer(client, prompt, NEW_TOKENS) for prompt in prompts))
            if round_ >= 0:
                speed[variant].append(n_tokens / (time.monotonic() - began))
                cpu[variant].append(1000 * (servers[variant].cpu_s() - used) / n_tokens)
    base = next(iter(clients))
    report.compare(f"tokens_per_s/{count}", speed, "tokens/s", base)
    report.compare(f"cpu_ms_per_token/{count}", cpu, "ms", base)


async def measure_turns(report: harness.Report, clients: dict[str, SGLangClient], cached: int, rounds: int) -> None:
    """The time to the first token of a session's next turn."""
    turns: dict[str, list[float]] = {variant: [] for variant in clients}
    for round_ in range(-1, rounds):
        for variant, client in clients.items():
            taken = await next_turn(client, cached, f"turn {round_}")
            if round_ >= 0:
                turns[variant].append(1000 * taken)
    report.compare("next_turn_ms", turns, "ms", next(iter(clients)))


async def serving(client: EngineClient) -> None:
    """Wait until a server serves."""
    for _ in range(START_S):
        if await client.health() is Health.SERVING:
            return
        await asyncio.sleep(1)
    raise SystemExit(f"{client.url} did not start")


async def answer(client: EngineClient, prompt: list[int], n_tokens: int, name: str = "") -> list[Chunk]:
    """The chunks of one call, sampled greedily."""
    params: Json = {"temperature": 0.0, "max_new_tokens": n_tokens, "ignore_eos": True}
    rid = name or f"{random.getrandbits(128):032x}"
    return [chunk async for chunk in client.generate(rid=rid, input_ids=prompt, sampling_params=params)]


async def next_turn(client: EngineClient, cached: int, seed: str) -> float:
    """Seconds of a call of one token whose prompt begins with that of the call before."""
    prompt = prompt_of(cached, seed)
    await answer(client, prompt, 1)
    began = time.monotonic()
    chunks = await answer(client, prompt + prompt_of(TURN_TOKENS, f"{seed} more"), 1)
    taken = time.monotonic() - began
    if (found := chunks[-1].cached_tokens) < cached - 1:
        raise SystemExit(f"{found} of {cached} tokens were cached")
    return taken


async def difference(clients: list[EngineClient]) -> float:
    """The largest difference of logprobs over prompts of several lengths, as long as the tokens are equal."""
    largest = 0.0
    prompts = [prompt_of(20 + 90 * call, f"difference {call}") for call in range(8)]
    answers = [await asyncio.gather(*(answer(client, prompt, NEW_TOKENS) for prompt in prompts)) for client in clients]
    for one, other in zip(*answers, strict=True):
        for (token, logprob), (same, its) in zip(tokens_of(one), tokens_of(other), strict=True):
            if token != same:
                break
            largest = max(largest, abs(logprob - its))
    return largest


def tokens_of(chunks: list[Chunk]) -> list[tuple[int, float]]:
    """The tokens of an answer, with their logprobs."""
    return [token for chunk in chunks for token in zip(chunk.output_ids, chunk.logprobs, strict=True)]


def prompt_of(n_tokens: int, seed: str) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(100, VOCABULARY) for _ in range(n_tokens)]


@contextmanager
def served(package: Path, model: str, log: Path) -> Iterator[Server]:
    """A server of the package in a folder, until the block ends."""
    port = free_port()
    command = [str(package / ".venv/bin/agentrl"), "engine", "--model", model, "--port", str(port), "--seed", "0"]
    env = os.environ | {"AGENTRL_ENGINE_KEY": KEY}
    with log.open("wb") as out:  # in the package's folder: the server's Python finds modules there first
        process = subprocess.Popen(
            [*command, "--log-file", str(log.with_suffix(".engine"))], stdout=out, stderr=out, env=env, cwd=package
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
