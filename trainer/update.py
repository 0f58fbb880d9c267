"""One step's worth of work: a batch goes in, gradients are applied, metrics come out.

        samples ─► trees ─┬─ to learn from ─► for each minibatch: forward/backward of its microbatches ─► clip ─► AdamW
                          └─ no advantage ──► forward only: counted in means and metrics, no gradient to add

A critic goes through the same minibatches, with gradients and an optimizer of its own.

With several minibatches the proximal logprobs of all come first. With one, the policy has not moved when its logprobs
are computed, so they are the proximal ones: no second forward. A batch without any advantage moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.corrections import interpolated_proximal, second_moment_limit, under_limit
from agentrl.trainer.algorithms.gae import value_losses
from agentrl.trainer.algorithms.losses import LossTokens, policy_loss
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.batch_metrics import Metrics
from agentrl.trainer.metrics.flops import Work, is_dense, update_flops
from agentrl.trainer.metrics.step_stats import Tally, mean
from agentrl.trainer.models.critic import Critic, Learner, explained_variance
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.models.sharding import backward, reshard
from agentrl.trainer.nonfinite import NonFinite, OnNonFinite, Seen, culprits, stop
from agentrl.trainer.optimizer import clip_gradients
from agentrl.trainer.packing import Microbatch, Sample, Unit, collate_share, make_units, plan

PASSES = ("forward_tokens", "forward_predictions", "backward_tokens", "backward_predictions")
"""What every rank adds up of the policy's passes."""


@dataclass(slots=True)
class Step:
    """What one step's forwards share."""

    algorithm: Algorithm
    version: int  # of the policy before the step
    ages: Mapping[int, int]  # of the versions that sampled, at this step
    passes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PASSES, 0.0))

    def passed(self, kind: str, m: Microbatch) -> None:
        """Count a `forward` or `backward` of the policy."""
        self.passes[f"{kind}_tokens"] += len(m.input_ids_N)
        self.passes[f"{kind}_predictions"] += len(m.sources_P)


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    version: int,
    ages: Mapping[int, int],
    config: TrainerConfig,
    world: World,
    learner: Learner | None = None,
    on_nonfinite: OnNonFinite = stop,
) -> Metrics:
    """Train on `samples`, sampled by weights up to `version`; `ages` maps the versions that sampled to their ages.

    A critic learns from the same minibatches. A minibatch whose loss or gradient is not finite moves nothing and is
    in no metric: `on_nonfinite` is told of it, and may raise. Returns the metrics, equal on every rank. Collective.
    """
    step = Step(config.algorithm, version, ages)
    budget = policy.budget(config.tokens_per_microbatch)
    units = make_units(samples, budget)
    teach = _teaching_groups(samples, step.algorithm)
    learning = _microbatches([u for u in units if u.group_id in teach], config.minibatches, budget, world)
    scored = _microbatches([u for u in units if u.group_id not in teach], 1, budget, world)
    rest = _totals((m for microbatches in scored for m in microbatches), world)
    tally, silent, skipped = Tally(), Tally(), 0
    with torch.no_grad():
        for m in (m for microbatches in scored for m in microbatches):
            _forward(policy, m, rest, 0.0, step, silent)
        if len(learning) > 1 and step.algorithm.proximal == "recompute" and samples[0].proximal is None:
            for m in (m for microbatches in learning for m in microbatches):
                m.proximal_S = _logprobs(policy, m, step)
    if _is_finite(silent, {}, "groups without advantage", step, world, on_nonfinite):
        tally.add(silent)
    else:
        skipped += 1
    learners: list[tuple[str, Body, torch.optim.Optimizer]] = [("grad_norm", policy, optimizer)]
    learners += [("value_grad_norm", learner.critic, learner.optimizer)] if learner else []
    grad_norms: dict[str, list[float]] = {name: [] for name, *_ in learners}
    for done, microbatches in enumerate(learning):
        mine = Tally()
        totals = _plus(_totals(microbatches, world), rest, 1 / len(learning))
        _leave_out_outliers(policy, microbatches, step, world)
        for i, m in enumerate(microbatches, 1):
            more = config.keep_gathered and i < len(microbatches)
            backward(policy, _forward(policy, m, totals, done / len(learning), step, mine), world, more=more)
            step.passed("backward", m)
            if learner:
                backward(learner.critic, _value_loss(learner.critic, m, totals, step, mine), world, more=more)
        norms = {name: clip_gradients(model, config.grad_clip) for name, model, _ in learners}
        finite = _is_finite(mine, norms, f"minibatch {done + 1} of {len(learning)}", step, world, on_nonfinite)
        for name, _, its_optimizer in learners:
            if finite:
                its_optimizer.step()
                grad_norms[name].append(norms[name])
            its_optimizer.zero_grad(set_to_none=True)
        if finite:
            tally.add(mine)
        else:
            skipped += 1
    reshard(policy)  # the optimizer and checkpoints know shards
    metrics = tally.metrics(len(grad_norms["grad_norm"]), step.algorithm, world) | _flops(policy, step, config, world)
    if learner:
        reshard(learner.critic)
        metrics["explained_variance"] = explained_variance(samples)
    return (
        metrics
        | {name: mean(norms) for name, norms in grad_norms.items()}
        | {"nonfinite_minibatches": float(skipped), "packed": float(not policy.unpacked)}
    )


def _is_finite(
    tally: Tally, norms: Mapping[str, float], where: str, step: Step, world: World, on_nonfinite: OnNonFinite
) -> bool:
    """Whether a minibatch may be learned from: its loss, gradients and logprobs are finite. If not, `on_nonfinite` was
    told. Collective."""
    bad = sum(int((~log_ratio_S.isfinite()).sum()) for log_ratio_S in tally.log_ratios)
    losses = ("loss", "value_loss") if step.algorithm.needs_critic else ("loss",)
    figures = world.total({name: tally.sums[name] for name in losses} | {"infinite_logprobs": float(bad)}) | dict(norms)
    if all(map(math.isfinite, figures.values())) and not figures["infinite_logprobs"]:
        return True
    blamed = culprits(tally.seen, step.algorithm, world)
    on_nonfinite(NonFinite(where=where, figures=figures, trajectories=blamed))
    return False


def _flops(policy: Policy, step: Step, config: TrainerConfig, world: World) -> Metrics:
    """Of the update's passes, over all ranks, where the model's arithmetic is known."""
    done, model = world.total(step.passes), policy.lm.config.to_dict()
    if policy.unpacked or not is_dense(model):
        return {}
    passes = ((done[f"{kind}_tokens"], done[f"{kind}_predictions"]) for kind in ("forward", "backward"))
    return {"flops": update_flops(model, Work(*passes), config)}


def _teaching_groups(samples: Sequence[Sample], algorithm: Algorithm) -> set[str]:
    """Groups that the gradient depends on: whole ones, however they are cut."""
    return {
        s.tokens.group_id for s in samples if algorithm.trains_every_token or s.advantages[s.tokens.loss_mask].any()
    }


def _microbatches(units: Sequence[Unit], minibatches: int, budget: int, world: World) -> list[list[Microbatch]]:
    """This rank's microbatches, per minibatch."""
    planned = plan(units, ranks=world.data_size, minibatches=minibatches, budget=budget)
    return [[m.to(world.device) for m in collate_share(by_rank, world.data_rank, budget)] for by_rank in planned]


def _totals(microbatches: Iterable[Microbatch], world: World) -> Totals:
    """Loss tokens and trajectories, over all ranks."""
    mine = [(len(m.advantages_S), m.sequences) for m in microbatches]
    counted = world.total({"tokens": float(sum(t for t, _ in mine)), "sequences": float(sum(s for _, s in mine))})
    return Totals(**counted)


def _plus(totals: Totals, rest: Totals, share: float) -> Totals:
    return Totals(totals.tokens + share * rest.tokens, totals.sequences + share * rest.sequences)


def _logprobs(policy: Policy, m: Microbatch, step: Step) -> Tensor:
    step.passed("forward", m)
    logprobs_P, _ = policy(m)
    logprobs_S: Tensor = logprobs_P[m.predictions_S]
    return logprobs_S


@torch.no_grad()
def _leave_out_outliers(policy: Policy, microbatches: Sequence[Microbatch], step: Step, world: World) -> None:
    """Set `keep_S` by the second moment over the whole minibatch. Collective."""
    if step.algorithm.m2_threshold is None:
        return
    ratios = [_logprobs(policy, m, step) - m.behavior_S for m in microbatches]
    limit = second_moment_limit(world.gather(torch.cat(ratios)), step.algorithm.m2_threshold)
    for m, log_ratio_S in zip(microbatches, ratios, strict=True):
        m.keep_S = under_limit(log_ratio_S, limit)


def _forward(policy: Policy, m: Microbatch, totals: Totals, progress: float, step: Step, tally: Tally) -> Tensor:
    """This microbatch's share of the minibatch's loss; the tally counts what it finds out.

    `progress` is the share of the step's updates that are made.
    """
    step.passed("forward", m)
    logprobs_P, entropy_P = policy(m, entropy_gradient=bool(step.algorithm.entropy_coef))
    logprobs_S, entropy_S = logprobs_P[m.predictions_S], entropy_P[m.predictions_S]
    proximal_S = _proximal(logprobs_S.detach(), m, progress, step)
    tokens = LossTokens(
        logprobs_S=logprobs_S,
        proximal_S=proximal_S,
        behavior_S=m.behavior_S,
        advantages_S=m.advantages_S,
        trajectories=Rows(m.trajectories_S, m.sequences),
        turns=Rows(m.turns_S, int(m.turns_S[-1]) + 1 if len(m.turns_S) else 0),
        keep_S=m.keep_S,
        reference_S=m.reference_S,
        entropy_S=entropy_S,
    )
    loss, parts = policy_loss(tokens, totals, step.algorithm)
    seen = replace(tokens, logprobs_S=logprobs_S.detach(), entropy_S=entropy_S.detach())
    tally.seen.append(Seen(m.trajectory_ids, seen))
    parts["entropy"] = entropy_S.detach().double().sum()
    for name, value in parts.items():
        tally.sums[name] += value.item()
    tally.sums["tokens"] += len(logprobs_S)
    tally.sums["tokens_computed"] += len(m.input_ids_N)
    tally.log_ratios.append((logprobs_S.detach() - m.behavior_S).cpu())
    if m.proximal_S is not None or not progress:  # known of the policy before the step
        before_S = logprobs_S if m.proximal_S is None else m.proximal_S
        tally.compare(before_S, m, step.version)
    total: Tensor = loss + 0.0 * logprobs_P.sum()  # without loss tokens, still part of the backward's collectives
    return total


def _value_loss(critic: Critic, m: Microbatch, totals: Totals, step: Step, tally: Tally) -> Tensor:
    """This microbatch's share of the minibatch's value loss, a mean over tokens."""
    assert m.values_S is not None
    assert m.targets_S is not None
    values_P = critic(m)
    losses_S = value_losses(values_P[m.predictions_S], m.values_S, m.targets_S, step.algorithm.value_clip)
    tally.seen[-1].value_losses_S = losses_S.detach()  # of the microbatch that the policy has just seen
    tally.sums["value_loss"] += losses_S.detach().double().sum().item()
    total: Tensor = losses_S.sum() / max(1.0, totals.tokens) + 0.0 * values_P.sum()  # as in `_forward`
    return total


def _proximal(logprobs_S: Tensor, m: Microbatch, progress: float, step: Step) -> Tensor:
    if step.algorithm.proximal == "behavior":
        return m.behavior_S
    if step.algorithm.proximal == "interpolate":
        ages_S = torch.tensor([step.ages[v] for v in m.versions_S.tolist()], device=logprobs_S.device)
        return interpolated_proximal(logprobs_S, m.behavior_S, ages_S, progress)
    return logprobs_S if m.proximal_S is None else m.proximal_S
