"""Measures the logprob mismatch between real SGLang and the trainer, in bfloat16, with and without routing replay.

    python benchmarks/routing_replay.py --out benchmarks/results/routing_replay.json

A mixture of experts and a dense model of the same width, both with random weights, each in a server of their own. The
gap of a token is log π_trainer − log π_engine of the same weights.

- `mismatch_mean/CASE`, `mismatch_p99/CASE`, `mismatch_max/CASE`: of the gaps' absolute values, in nats.
- `mismatch_kl/CASE`: KL(engine ‖ trainer), estimated by k3.
- `recorded/CASE`: the share of the tokens that the trainer reads whose experts are RECORDED.
- `disagreements/CASE`: shared tokens for which answers report other experts.

Cases: `dense`; `free`: the mixture with its own choice of experts; `replayed`: with the engine's; `free-retracted` and
`replayed-retracted`: of answers that a pause in mode `retract` interrupted.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import harness
import numpy as np
import torch
import transformers

from agentrl.domain.experts.routed_experts import RoutedExperts, RouteOrigin, RoutingShape
from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server, free_port, launch
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.models import routing_shape, tiny
from agentrl.proxy.calls.sampling.routed_rows import RoutedRows
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.metrics.batch_metrics import mismatch_metrics
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.packing import Sample, collate, make_units

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "eos_token_id": tiny.IM_END,
    "pad_token_id": tiny.PAD,
    "bos_token_id": None,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
PROMPT_TOKENS, NEW_TOKENS = 48, 64
RETRACT_AFTER = 4
"""Events of one answer after which the pause begins."""


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(__doc__, rounds=(int, 1, "servers of each model"), answers=(int, 24, "answers a case"))
    report = harness.Report("routing_replay")
    report.notes |= {"sizes": SIZES, "mixture": MIXTURE, "answers": options.answers, "new_tokens": NEW_TOKENS}
    rounds = [measure(options.answers, seed) for seed in range(options.rounds)]
    for name in rounds[0]:
        unit = "nats" if name.startswith("mismatch") else "tokens" if name.startswith("disagree") else "share"
        report.add(name, [found[name] for found in rounds], unit)
    harness.finish(report, options.out)


def measure(answers: int, seed: int) -> dict[str, float]:
    """One server of each model."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, join_world("cpu") as world:
        folder = Path(name)
        dense = save(folder / "dense", "Qwen3", {}, seed)
        with serving(dense, routed=False) as server:
            sampled = asyncio.run(sample(server, answers, None, seed))
        found |= gaps(load(dense, world), sampled, "dense")
        mixture = save(folder / "mixture", "Qwen3Moe", MIXTURE, seed)
        with serving(mixture, routed=True) as server:
            shape = routing_shape(mixture)
            sampled = asyncio.run(sample(server, answers, shape, seed))
            retracted = asyncio.run(sample(server, answers, shape, seed + 1, retracts=True))
        policy = load(mixture, world, replay_routing=True)
        for case, answered in (("", sampled), ("-retracted", retracted)):
            found |= gaps(policy, answered, f"replayed{case}")
            found |= gaps(policy, [replace(t, routed=None) for t in answered], f"free{case}")
    return found


def save(folder: Path, family: str, settings: dict[str, Any], seed: int) -> Path:
    """A random model whose weights bfloat16 holds exactly, with the tiny model's tokenizer."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | settings))
    lm = transformers.AutoModelForCausalLM.from_config(config)
    lm.to(torch.bfloat16).float().save_pretrained(folder)
    tiny.make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config()))
    (folder / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)
    return folder


def load(folder: Path, world: World, *, replay_routing: bool = False) -> Policy:
    """The trainer's policy, in bfloat16."""
    return load_sharded(Policy, folder, world.mesh, dtype=torch.bfloat16, replay_routing=replay_routing)


@contextmanager
def serving(model: Path, *, routed: bool) -> Iterator[Server]:
    """A healthy server in bfloat16."""
    log = model / "engine.log"
    server = launch(EngineSpec(model=model, port=free_port(), log_file=log, dtype="bfloat16", routed_experts=routed))
    try:
        asyncio.run(server.wait_healthy())
        yield server
    finally:
        server.stop()


async def sample(
    server: Server, answers: int, shape: RoutingShape | None, seed: int, *, retracts: bool = False
) -> list[TrajectoryTokens]:
    """Answers to random prompts, sampled together; four prompts begin alike, so that their prefix is cached."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, SIZES["vocab_size"], PROMPT_TOKENS).tolist() for _ in range(answers)]
    prompts = [prompts[i - i % 4][: PROMPT_TOKENS // 2] + p[PROMPT_TOKENS // 2 :] for i, p in enumerate(prompts)]
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        client = stack.enter_context(closing(SGLangClient(server.url, http, key=server.spec.key)))
        begun = asyncio.Event()
        tasks = [asyncio.create_task(answer(client, i, p, shape, begun)) for i, p in enumerate(prompts)]
        if retracts:
            await begun.wait()
            await client.pause("retract")
            await client.continue_generation()
        return list(await asyncio.gather(*tasks))


async def answer(
    client: EngineClient, number: int, prompt: list[int], shape: RoutingShape | None, begun: asyncio.Event
) -> TrajectoryTokens:
    """One answer, with its experts as the proxy records them."""
    rows = None if shape is None else RoutedRows(shape, 0, len(prompt))
    output: list[int] = []
    logprobs: list[float] = []
    events = 0
    async for chunk in client.generate(
        rid=uuid.uuid4().hex,
        input_ids=prompt,
        sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0},
        experts_from=None if rows is None else 0,
    ):
        output += chunk.output_ids
        logprobs += chunk.logprobs
        if rows is not None:
            rows.read(chunk, len(output))
        events += 1
        if events == RETRACT_AFTER:
            begun.set()
    ids = np.array([*prompt, *output], np.int32)
    own = np.arange(len(ids)) >= len(prompt)
    recorded = np.zeros(len(ids), np.float32)
    recorded[own] = logprobs
    return TrajectoryTokens(
        trajectory_id=f"t{number}",
        session_id=f"s{number}",
        episode_id=f"s{number}",
        group_id=f"g{number // 4}",
        input_ids=ids,
        loss_mask=own,
        logprobs=recorded,
        versions=np.where(own, 0, PROMPT_VERSION).astype(np.int32),
        turn_ids=np.where(own, 0, -1).astype(np.int32),
        temperatures=np.ones(len(ids), np.float32),
        turn_returns=np.zeros(1),
        episode_return=0.0,
        routed=None if rows is None else whole(rows.finished(len(output)).experts),
    )


def whole(experts: RoutedExperts) -> RoutedExperts:
    """With the last position, which no engine has computed."""
    last = RoutedExperts.missing(1, *experts.ids.shape[1:])
    return RoutedExperts(
        np.concatenate([experts.ids, last.ids.astype(experts.ids.dtype)]),
        np.concatenate([experts.origins, last.origins]),
    )


@torch.no_grad()
def gaps(policy: Policy, found: list[TrajectoryTokens], case: str) -> dict[str, float]:
    """The mismatch of the answers' logprobs."""
    samples = [Sample(t, np.zeros(len(t.input_ids), np.float32)) for t in found]
    batch = collate(make_units(samples, 1_000_000))
    gap_S = policy(batch)[0][batch.predictions_S] - batch.behavior_S
    metrics = mismatch_metrics(gap_S)
    result = {
        f"mismatch_mean/{case}": metrics["logprob_mismatch_mean_abs"],
        f"mismatch_p99/{case}": float(gap_S.abs().quantile(0.99)),
        f"mismatch_max/{case}": metrics["mismatch_max"],
        f"mismatch_kl/{case}": metrics["mismatch_kl"],
    }
    if batch.routes is not None:
        recorded = batch.routes.origins_N == RouteOrigin.RECORDED
        result[f"recorded/{case}"] = float(recorded.float().mean())
        result[f"disagreements/{case}"] = float(batch.routes.disagreements)
    return result


if __name__ == "__main__":
    main()
