"""One step's worth of work: a batch goes in, gradients are applied, metrics come out.

        samples ─► trees ─┬─ some advantage ─► for each minibatch: forward/backward of its microbatches ─► clip ─► AdamW
                          └─ none at all ────► forward only: counted in means and metrics, no gradient to add

With several minibatches the proximal logprobs of all come first. With one, the policy has not moved when its logprobs
are computed, so they are the proximal ones: no second forward. A batch without any advantage moves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.config import TrainerConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.losses import decoupled_policy_loss, mismatch_sums
from agentrl.trainer.model import Policy
from agentrl.trainer.packing import Microbatch, Sample, Unit, collate, make_units, plan

PER_TOKEN = ("loss", "clip_fraction", "behavior_weight", "behavior_weight_capped", "approx_kl", "entropy")
"""Metrics that are means over the loss tokens of all minibatches."""
SUMMED = (*PER_TOKEN, "mismatch", "mismatch_tokens", "drift", "drift_tokens", "tokens", "tokens_computed")
"""What every rank adds up."""


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
    units = make_units(samples, config.tokens_per_microbatch)
    learning = _microbatches([u for u in units if _has_advantage(u)], config.minibatches, config, world)
    scored = _microbatches([u for u in units if not _has_advantage(u)], 1, config, world)
    sums: dict[str, float] = defaultdict(float)
    with torch.no_grad():
        for m in (m for microbatches in scored for m in microbatches):
            _forward(policy, m, version, config, sums)
        if len(learning) > 1:
            for m in (m for microbatches in learning for m in microbatches):
                logprobs_P, _ = policy(m)
                m.proximal_S = logprobs_P[m.predictions_S]
    grad_norms = [0.0] if not learning else []
    scored_tokens = _loss_tokens((m for microbatches in scored for m in microbatches), world)
    for microbatches in learning:
        tokens = _loss_tokens(microbatches, world) + scored_tokens / len(learning)
        for m in microbatches:
            loss = _forward(policy, m, version, config, sums)
            (loss * (world.size / tokens)).backward()  # type: ignore[no-untyped-call]  # FSDP averages over ranks
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in policy.trainable()], config.grad_clip)
        grad_norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _metrics(world.total({name: sums[name] for name in SUMMED}), grad_norms)


def _has_advantage(unit: Unit) -> bool:
    return any(s.advantages[s.tokens.loss_mask].any() for s in unit.samples)


def _microbatches(
    units: Sequence[Unit], minibatches: int, config: TrainerConfig, world: World
) -> list[list[Microbatch]]:
    """This rank's microbatches, per minibatch."""
    budget = config.tokens_per_microbatch
    planned = plan(units, ranks=world.size, minibatches=minibatches, budget=budget)
    return [[collate(rows).to(world.device) for rows in by_rank[world.rank]] for by_rank in planned]


def _loss_tokens(microbatches: Iterable[Microbatch], world: World) -> float:
    return world.total({"n": float(sum(len(m.advantages_S) for m in microbatches))})["n"]


def _forward(policy: Policy, m: Microbatch, version: int, config: TrainerConfig, sums: dict[str, float]) -> Tensor:
    """The summed loss of one microbatch; its metrics are added to `sums`."""
    logprobs_P, entropy_P = policy(m)
    logprobs_S = logprobs_P[m.predictions_S]
    proximal_S = logprobs_S.detach() if m.proximal_S is None else m.proximal_S
    loss, parts = decoupled_policy_loss(
        logprobs_S,
        proximal_S,
        m.behavior_S,
        m.advantages_S,
        eps_low=config.eps_clip,
        eps_high=config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher,
        behavior_weight_cap=config.behavior_weight_cap,
    )
    parts |= mismatch_sums(proximal_S, m.behavior_S, m.versions_S, version)
    parts["entropy"] = entropy_P[m.predictions_S].double().sum()
    for name, value in parts.items():
        sums[name] += value.item()
    sums["tokens"] += len(logprobs_S)
    sums["tokens_computed"] += len(m.input_ids_N)
    total: Tensor = loss + 0.0 * logprobs_P.sum()  # without loss tokens, still part of the backward's collectives
    return total


def _metrics(sums: dict[str, float], grad_norms: Sequence[float]) -> dict[str, float]:
    metrics = {name: sums[name] / max(1.0, sums["tokens"]) for name in PER_TOKEN}
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
