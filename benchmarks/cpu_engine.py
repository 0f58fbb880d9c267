"""Measures how fast an engine on a CPU samples, and how much of the CPU it needs.

    python benchmarks/cpu_engine.py --out benchmarks/results/cpu_engine.json --before FOLDER
    python benchmarks/cpu_engine.py --out benchmarks/results/cpu_backends.json --vllm 1 --calls 1,8,32,128

Each variant is one real server of SmolLM2-135M; they take turns. N calls of different prompts run at once.

- `start_s/VARIANT`: from the start of the command until the server serves; the variants start one after another.
- `tokens_per_s/N/VARIANT`: tokens that N calls got, by the time until the last one ended.
- `cpu_ms_per_token/N/VARIANT`: CPU time of the server's processes, by tokens.
- `next_turn_ms/VARIANT`: the time to the first token of a call whose prompt is the last call's --cached tokens and 20
  new ones.
- `logprob_difference`: the largest difference between the variants' logprobs of the same tokens, sampled greedily.
- `logprob_error/VARIANT`: the largest difference between its logprobs and those that transformers computes in float64
  (norms and rotary angles in float32, as the model is defined).

VARIANT is `after`, SGLang with this commit, `before`, SGLang with the package in the folder `--before`: a checkout of
an earlier commit in which `make setup` was run, or `vllm`, vLLM with this commit (`make setup-vllm`).
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
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import harness
import psutil

from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.server_process import free_port
from agentrl.models import resolve_model

ROOT = Path(__file__).resolve().parent.parent
START_S = 300
VOCABULARY = 40_000
PROMPT_TOKENS = 100
NEW_TOKENS = 32
TURN_TOKENS = 20
BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU: the last, incomplete block is not cached."""
KEY = "benchmark-key"
Answer = list[tuple[int, float]]
"""The tokens of an answer, with their logprobs."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: psutil.Process
    backend: str

    def client(self, http: aiohttp.ClientSession) -> EngineClient:
        """A client of its backend."""
        return BACKENDS[self.backend].client(self.url, http, key=KEY)

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
        vllm=(int, 0, "1: measure vLLM too"),
    )
    report = harness.Report("cpu_backends" if options.vllm else "cpu_engine")
    packages = ({"before": Path(options.before)} if options.before else {}) | {"after": ROOT}
    packages |= {"vllm": ROOT} if options.vllm else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, Server] = {}
        for variant, package in packages.items():
            began = time.monotonic()
            server = stack.enter_context(served(package, options.model, folder / f"{variant}.log", variant))
            asyncio.run(until_serving(server))
            report.add(f"start_s/{variant}", [time.monotonic() - began], "s")
            servers[variant] = server
        asyncio.run(measure(report, servers, options))
    harness.finish(report, options.out)


async def measure(report: harness.Report, servers: dict[str, Server], options: argparse.Namespace) -> None:
    """All figures."""
    async with aiohttp.ClientSession() as http:
        with ExitStack() as stack:
            clients = {
                variant: stack.enter_context(closing(server.client(http))) for variant, server in servers.items()
            }
            for count in map(int, options.calls.split(",")):
                await measure_calls(report, clients, servers, count, options.rounds)
            await measure_turns(report, clients, options.cached, options.rounds)
            await measure_logprobs(report, clients, resolve_model(options.model))


async def measure_calls(
    report: harness.Report, clients: dict[str, EngineClient], servers: dict[str, Server], count: int, rounds: int
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


async def measure_turns(report: harness.Report, clients: dict[str, EngineClient], cached: int, rounds: int) -> None:
    """The time to the first token of a session's next turn."""
    turns: dict[str, list[float]] = {variant: [] for variant in clients}
    for round_ in range(-1, rounds):
        for variant, client in clients.items():
            taken = await next_turn(client, cached, f"turn {round_}")
            if round_ >= 0:
                turns[variant].append(1000 * taken)
    report.compare("next_turn_ms", turns, "ms", next(iter(clients)))


async def until_serving(server: Server) -> None:
    """Wait until a server serves."""
    async with aiohttp.ClientSession() as http:
        with closing(server.client(http)) as client:
            for _ in range(10 * START_S):
                if await client.health() is Health.SERVING:
                    return
                await asyncio.sleep(0.1)
    raise SystemExit(f"{server.url} did not start")


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
    if (found := chunks[-1].cached_tokens) < cached - BLOCK:
        raise SystemExit(f"{found} of {cached} tokens were cached")
    return taken


async def measure_logprobs(report: harness.Report, clients: dict[str, EngineClient], model: Path) -> None:
    """How exact logprobs are, over prompts of several lengths at once."""
    prompts = [prompt_of(20 + 90 * call, f"difference {call}") for call in range(8)]
    answers: dict[str, list[Answer]] = {}
    for variant, client in clients.items():
        chunks = await asyncio.gather(*(answer(client, prompt, NEW_TOKENS) for prompt in prompts))
        answers[variant] = [tokens_of(each) for each in chunks]
    if len(answers) > 1:
        report.add("logprob_difference", [max(map(difference, *answers.values()))], "nats")
    known: dict[tuple[int, ...], list[float]] = {}
    for variant, found in answers.items():
        errors = []
        for prompt, each in zip(prompts, found, strict=True):
            ids = tuple(token for token, _ in each)
            if (*prompt, *ids) not in known:
                known[*prompt, *ids] = exact_logprobs(model, prompt, list(ids))
            exact = known[*prompt, *ids]
            errors.append(max(abs(logprob - its) for (_, logprob), its in zip(each, exact, strict=True)))
        report.add(f"logprob_error/{variant}", [max(errors)], "nats")


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of logprobs as long as the tokens are equal."""
    largest = 0.0
    for (token, logprob), (same, its) in zip(one, other, strict=True):
        if token != same:
            break
        largest = max(largest, abs(logprob - its))
    return largest


def exact_logprobs(model: Path, prompt: list[int], output: list[int]) -> list[float]:
    """The logprobs of an answer's tokens, computed in float64."""
    import torch

    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = loaded(model)(ids).logits[0, len(prompt) - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return found


@cache
def loaded(model: Path) -> Any:
    """The model in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()


def tokens_of(chunks: list[Chunk]) -> Answer:
    return [token for chunk in chunks for token in zip(chunk.output_ids, chunk.logprobs, strict=True)]


def prompt_of(n_tokens: int, seed: str) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(100, VOCABULARY) for _ in range(n_tokens)]


@contextmanager
def served(package: Path, model: str, log: Path, variant: str) -> Iterator[Server]:
    """A server of the package in a folder, until the block ends."""
    port, backend = free_port(), "vllm" if variant == "vllm" else "sglang"
    command = [str(package / ".venv/bin/agentrl"), "engine", "--model", model, "--port", str(port), "--seed", "0"]
    if backend == "vllm":
        command += ["--backend", backend]
    env = os.environ | {"AGENTRL_ENGINE_KEY": KEY}
    with log.open("wb") as out:  # in the package's folder: the server's Python finds modules there first
        process = subprocess.Popen(
            [*command, "--log-file", str(log.with_suffix(".engine"))], stdout=out, stderr=out, env=env, cwd=package
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), backend)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
