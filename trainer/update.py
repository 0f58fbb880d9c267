"""One optimizer step's worth of work: a batch goes in, gradients are applied, metrics come out.

        samples ─► units ─► plan ─► for each minibatch:  forward/backward of its microbatches ─► clip ─► AdamW
                                │
                                └─ with several minibatches: proximal logprobs of all, before the first update

With one minibatch the policy has not moved when its logprobs are computed, so they are the proximal ones: no second
forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from agentrl.config import TrainerConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.losses import decoupled_policy_loss, mismatch_sums
from agentrl.trainer.model import Policy
from agentrl.trainer.packing import Microbatch, Sample, collate, make_units, plan

PER_TOKEN = ("loss", "clip_fraction", "behavior_weight", "behavior_weight_capped", "approx_kl", "entropy")
"""Metrics that are means over the loss tokens of all minibatches."""


def make_optimizer(policy: Policy, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters."""
    parameters = [p for _, p in policy.trainable()]
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, foreach=True
    )


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    version: int,
    config: TrainerConfig,
    world: World,
) -> dict[str, float]:
    """Train on `samples`, sampled by weights up to `version`. Returns the metrics, equal on every rank. Collective."""
    planned = plan(
        make_units(samples, config.tokens_per_microbatch),
        ranks=world.size,
        minibatches=config.minibatches,
        budget=config.tokens_per_microbatch,
    )
    minibatches = [[collate(rows).to(world.device) for rows in ranks[world.rank]] for ranks in planned]
    sums: dict[str, float] = defaultdict(float)
    if len(minibatches) > 1:
        for microbatch in (m for microbatches in minibatches for m in microbatches):
            with torch.no_grad():
                logprobs_P, _ = policy(microbatch)
            microbatch.proximal_S = logprobs_P[microbatch.predictions_S]
    grad_norms = []
    for microbatches in minibatches:
        _accumulate(policy, microbatches, version, config, world, sums)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in policy.trainable()], config.grad_clip)
        grad_norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _metrics(world.total(dict(sums)), grad_norms)


def _accumulate(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    version: int,
    config: TrainerConfig,
    world: World,
    sums: dict[str, float],
) -> None:
    """Add the gradients of one minibatch, divided by its loss tokens on all ranks."""
    tokens = world.total({"n": float(sum(len(m.advantages_S) for m in microbatches))})["n"]
    high = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    for m in microbatches:
        logprobs_P, entropy_P = policy(m)
        logprobs_S = logprobs_P[m.predictions_S]
        proximal_S = logprobs_S.detach() if m.proximal_S is None else m.proximal_S
        loss, parts = decoupled_policy_loss(
            logprobs_S,
            proximal_S,
            m.behavior_S,
            m.advantages_S,
            eps_low=config.eps_clip,
            eps_high=high,
            behavior_weight_cap=config.behavior_weight_cap,
        )
        # FSDP averages gradients over ranks. The zero keeps a pass without loss tokens in the backward's collectives.
        (loss * (world.size / tokens) + 0.0 * logprobs_P.sum()).backward()  # type: ignore[no-untyped-call]
        parts |= mismatch_sums(proximal_S, m.behavior_S, m.versions_S, version)
        parts["entropy"] = entropy_P[m.predictions_S].double().sum()
        for name, value in parts.items():
            sums[name] += value.item()
        sums["tokens"] += len(logprobs_S)
        sums["tokens_computed"] += len(m.input_ids_N)


def _metrics(sums: dict[str, float], grad_norms: Sequence[float]) -> dict[str, float]:
    if not sums:
        return {"tokens_trained": 0.0, "grad_norm": 0.0}
    metrics = {name: sums[name] / sums["tokens"] for name in PER_TOKEN}
    if sums["mismatch_tokens"]:
        metrics["logprob_mismatch_mean_abs"] = sums["mismatch"] / sums["mismatch_tokens"]
    if sums["drift_tokens"]:
        metrics["drift"] = sums["drift"] / sums["drift_tokens"]
    return metrics | {
        "mismatch_tokens": sums["mismatch_tokens"],
        "drift_tokens": sums["drift_tokens"],
        "tokens_trained": sums["tokens"],
        "tokens_computed": sums["tokens_computed"],
        "grad_norm": sum(grad_norms) / len(grad_norms),
    }
