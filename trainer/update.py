"""One step's update in three phases: samples go in, gradients are applied, metrics come out.

    plan    samples ─► prefix trees ─┬─► minibatches of groups that teach ─► microbatches of this rank
                                     └─► groups without an advantage, "silent"
    score   silent groups: forward only, for means and metrics; several minibatches: proximal logprobs of all first
    learn   for each minibatch: choose tokens ─► forward and backward of its microbatches ─► clip ─► AdamW

A critic learns from the same minibatches, with gradients and an optimizer of its own. With one minibatch the policy
has not moved when its logprobs are computed, so these are the proximal logprobs and need no forward pass of their own.
A batch without any advantage changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.user_functions import LossFunction
from agentrl.trainer.averages.noise_scale import Estimates, estimate
from agentrl.trainer.batches.share import Pack, Share, built, minibatch_packs, share_of
from agentrl.trainer.batches.step_times import StepTimes
from agentrl.trainer.batches.token_choice import Scored, choose_tokens, counted
from agentrl.trainer.distributed import World
from agentrl.trainer.forward_pass import Passes, value_loss
from agentrl.trainer.metrics.batch_metrics import Metrics
from agentrl.trainer.metrics.engine_gaps import CallGaps
from agentrl.trainer.metrics.fact_collector import FactCollector
from agentrl.trainer.metrics.flops import PassCounts, update_flops
from agentrl.trainer.metrics.model_shape import shape_of
from agentrl.trainer.metrics.step_stats import StepStats, mean
from agentrl.trainer.models.critic import Learner, explained_variance
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.models.sharding import backward, reshard
from agentrl.trainer.nonfinite import NonFinite, OnNonFinite, culprits, stop
from agentrl.trainer.optimizer import clip_gradients, gradient_norm
from agentrl.trainer.packing import Microbatch, Sample
from agentrl.trainer.parallel.tensor_parallel import average_replicated
from agentrl.trainer.recurrence.carrying import carriers


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's microbatches on this rank, before their tensors are made."""

    minibatches: list[list[Pack]]  # of groups that the gradient depends on
    silent: list[Pack]  # of groups without any advantage: they count in means
    silent_totals: Totals  # over all ranks


@dataclass(slots=True)
class Update:
    """The state that the phases of one step share. `stats` and `grad_norms` cover its finite minibatches."""

    passes: Passes
    optimizer: torch.optim.Optimizer
    learner: Learner | None
    config: TrainerConfig
    world: World
    on_nonfinite: OnNonFinite
    stats: StepStats = field(default_factory=StepStats)
    grad_norms: dict[str, list[float]] = field(default_factory=dict)  # by metric name
    skipped: int = 0  # minibatches that were not finite
    token_facts: FactCollector | None = None
    call_gaps: CallGaps | None = None
    times: StepTimes = field(kw_only=True)
    only_critic: bool = False
    noise: Estimates | None = None  # where the noise scale is measured

    @property
    def models(self) -> list[tuple[str, Body, torch.optim.Optimizer]]:
        """For each model: the name of its gradient norm's metric, the model, its optimizer."""
        critic = [("value_grad_norm", self.learner.critic, self.learner.optimizer)] if self.learner else []
        return [("grad_norm", self.passes.policy, self.optimizer), *critic]

    @property
    def learning(self) -> list[tuple[str, Body, torch.optim.Optimizer]]:
        """Those of `models` that learn in this step."""
        return self.models[1:] if self.only_critic else self.models

    def built(self, packs: Iterable[Pack], *, last: bool = True) -> Iterator[tuple[Pack, Microbatch]]:
        """As share.built, on this rank's device."""
        return built(packs, self.world.device, self.times, last=last)

    def add(self, stats: StepStats) -> None:
        """Add a minibatch whose figures are finite."""
        self.stats.add(stats)
        if self.token_facts is not None:
            self.token_facts.add(stats.seen)
        if self.call_gaps is not None:
            self.call_gaps.merge(stats.call_gaps)


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Share | Sequence[Sample],
    version: int,
    ages: Mapping[int, int],
    config: TrainerConfig,
    world: World,
    learner: Learner | None = None,
    on_nonfinite: OnNonFinite = stop,
    loss: LossFunction | None = None,
    token_facts: FactCollector | None = None,
    times: StepTimes | None = None,
    call_gaps: CallGaps | None = None,
    *,
    only_critic: bool = False,
    teachers: Mapping[str, Policy] | None = None,
    noise: Estimates | None = None,
) -> Metrics:
    """Train on samples, sampled by weights up to `version`; `ages` maps each version that sampled them to its age.
    `samples` is this rank's share of them, or all samples on every rank. `loss` is the user's, in place of the
    algorithm's. `token_facts` gets the tokens of finite minibatches, `call_gaps` how far their calls' logprobs are
    from the engine's, and `times` the time of each part. With `only_critic` the policy is measured and stays.
    `teachers` are those whose distributions the loss may compare, by name. `noise` gets estimates of the gradient's
    noise, from minibatches with several microbatches, whose order is then random.

    A minibatch whose loss or gradient is not finite changes nothing and enters no metric: `on_nonfinite` is called with
    the `NonFinite`, and may raise. Returns the metrics, equal on every rank. Collective.
    """
    budget = policy.budget(config.token_budget)
    share = (
        samples
        if isinstance(samples, Share)
        else share_of(samples, config.algorithm, config.minibatches, budget, world)
    )
    if token_facts is not None:
        share = replace(share, samples=token_facts.marked(share.samples))
    passes = Passes(policy, config.algorithm, version, ages, loss, config.router_aux_loss_coef, teachers or {})
    times = times or StepTimes(world.device)
    update = Update(
        passes,
        optimizer,
        learner,
        config,
        world,
        on_nonfinite,
        token_facts=token_facts,
        call_gaps=call_gaps,
        times=times,
        only_critic=only_critic,
        noise=noise,
    )
    with times.reading("build"):
        work = plan_update(share, budget, config, world)
    if config.algorithm.masked_in_mean != "all":
        _choose_tokens(update, work.silent, 0.0)
        work = replace(work, silent_totals=counted(work.silent, config.algorithm, world))
    score(update, work)
    learn(update, work)
    return _metrics(update, share)


# -- plan -------------------------------------------------------------------------------------------------------------


def plan_update(share: Share, budget: int, config: TrainerConfig, world: World) -> Plan:
    """Pack groups into this rank's microbatches of at most `budget` tokens. Collective."""
    minibatches, silent = minibatch_packs(share, config.algorithm, config.minibatches, budget, world)
    return Plan(minibatches, silent, counted(silent, config.algorithm, world))


# -- score ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(update: Update, work: Plan) -> None:
    """Count the silent groups and, where several minibatches need them, compute proximal logprobs. Collective."""
    passes, silent = update.passes, StepStats()
    for _, m in update.built(work.silent):
        with update.times.reading("forward"):
            passes.loss(m, work.silent_totals, 0.0, silent)
    algorithm = passes.algorithm
    known = algorithm.teaches_tokens or (algorithm.needs_reference and algorithm.kl == "reward")  # by scoring.py
    if len(work.minibatches) > 1 and algorithm.proximal == "recompute" and not known:
        for packs in work.minibatches:
            for pack, m in update.built(packs, last=False):
                with update.times.reading("forward"):
                    pack.proximal_S = passes.logprobs(m)
    if _is_finite(update, silent, {}, "groups without advantage"):
        update.add(silent)
    else:
        update.skipped += 1


# -- learn ------------------------------------------------------------------------------------------------------------


def learn(update: Update, work: Plan) -> None:
    """Make one optimizer step for each minibatch, unless it is not finite. Collective."""
    count = len(work.minibatches)
    update.grad_norms = {name: [] for name, *_ in update.learning}
    for done, of_minibatch in enumerate(work.minibatches):
        packs = of_minibatch if update.noise is None else _shuffled(of_minibatch, f"{update.passes.version}/{done}")
        _choose_tokens(update, packs, done / count)
        totals = _plus(counted(packs, update.passes.algorithm, update.world), work.silent_totals, 1 / count)
        stats, first_norm = _accumulate_gradients(update, packs, totals, done / count)
        with update.times.reading("update"):
            finite = _apply_gradients(update, stats, f"minibatch {done + 1} of {count}")
        if finite:
            update.add(stats)
            if update.noise is not None and first_norm is not None:
                _add_estimate(update, update.noise, packs, totals, first_norm)
        else:
            update.skipped += 1
    for _, model, _ in update.models:
        reshard(model)  # the optimizer and checkpoints know shards
    for teacher in update.passes.teachers.values():
        reshard(teacher)


def _apply_gradients(update: Update, stats: StepStats, where: str) -> bool:
    """Clip the gradients and make the optimizers' steps, unless something is not finite; returns whether all was
    finite. Collective.
    """
    for _, model, _ in update.learning:
        average_replicated(model, update.world.mesh)
    norms = {name: clip_gradients(model, update.config.grad_clip) for name, model, _ in update.learning}
    finite = _is_finite(update, stats, norms, where)
    for name, _, optimizer in update.learning:
        if finite:
            optimizer.step()
            update.grad_norms[name].append(norms[name])
        optimizer.zero_grad(set_to_none=True)
    return finite


def _shuffled(packs: Sequence[Pack], key: str) -> list[Pack]:
    """In a random order, the same on every rank: packing puts the longest samples first."""
    return random.Random(key).sample(list(packs), len(packs))


def _add_estimate(update: Update, noise: Estimates, packs: Sequence[Pack], totals: Totals, first_norm: float) -> None:
    """Add the estimate from the gradients of the first microbatch and of all. Collective.

    Both are parts of one sum: divided by their shares of what the loss is divided by, they are mean gradients. Groups
    without advantage are counted in neither.
    """
    algorithm = update.passes.algorithm
    first, whole = (counted(part, algorithm, update.world) for part in (packs[:1], packs))
    by_tokens = algorithm.aggregation == "token_mean"
    small, big, all_ = (one.tokens if by_tokens else one.sequences for one in (first, whole, totals))
    if not 0 < small < big:
        return
    big_norm = update.grad_norms["grad_norm"][-1] * all_ / big
    noise.found.append(estimate(first_norm * all_ / small, whole.sequences * small / big, big_norm, whole.sequences))


def _accumulate_gradients(
    update: Update, packs: Sequence[Pack], totals: Totals, progress: float
) -> tuple[StepStats, float | None]:
    """Forward and backward of a minibatch's microbatches. Also returns the norm of the policy's gradient after the
    first of several, where the noise is measured. Collective.
    """
    stats, algorithm, times = StepStats(), update.passes.algorithm, update.times
    first_norm: float | None = None
    for i, (_, m) in enumerate(update.built(packs), 1):
        more = update.config.keep_gathered and i < len(packs)
        with times.reading("forward"), torch.set_grad_enabled(not update.only_critic):
            loss = update.passes.loss(m, totals, progress, stats)
        if not update.only_critic:
            with times.reading("backward"):
                backward(update.passes.policy, loss, update.world, more=more)
            if update.noise is not None and i == 1 < len(packs):
                with times.reading("update"):
                    first_norm = update.world.share(float(gradient_norm(update.passes.policy)))  # equal on all ranks
        if update.learner:
            critic = update.learner.critic
            with times.reading("forward"):
                loss = value_loss(critic, m, totals, algorithm, stats)
            with times.reading("backward"):
                backward(critic, loss, update.world, more=more)
    return stats, first_norm


def _plus(totals: Totals, rest: Totals, share: float) -> Totals:
    return Totals(
        totals.tokens + share * rest.tokens,
        totals.sequences + share * rest.sequences,
        totals.turns + share * rest.turns,
    )


@torch.no_grad()
def _choose_tokens(update: Update, packs: Sequence[Pack], progress: float) -> None:
    """Choose tokens by figures of the whole minibatch, where the algorithm does. Collective."""
    passes = update.passes
    if not passes.algorithm.chooses_tokens:
        return
    scored = []
    for pack, m in update.built(packs, last=False):
        with update.times.reading("forward"):
            logprobs_S = passes.logprobs(m)
        proximal_S = passes.proximal(logprobs_S, m, progress)
        scored.append(Scored.of(pack, m, logprobs_S, proximal_S))
        if passes.algorithm.proximal == "recompute":
            pack.proximal_S = proximal_S
    passes.mean_weight = choose_tokens(scored, passes.algorithm, passes.version, update.world)


def _is_finite(update: Update, stats: StepStats, norms: Mapping[str, float], where: str) -> bool:
    """Whether loss, gradients and logprobs are finite. If they are not, calls `on_nonfinite`. Collective."""
    algorithm, world = update.passes.algorithm, update.world
    stats.settle()
    bad = sum(int((~log_ratio_S.isfinite()).sum()) for log_ratio_S in stats.log_ratios)
    losses = ("loss", "value_loss") if algorithm.needs_critic else ("loss",)
    figures = world.total({name: stats.sums[name] for name in losses} | {"infinite_logprobs": float(bad)}) | dict(norms)
    if all(map(math.isfinite, figures.values())) and not figures["infinite_logprobs"]:
        return True
    blamed = culprits(stats.seen, algorithm if update.passes.loss_function is None else None, world)
    update.on_nonfinite(NonFinite(where=where, figures=figures, trajectories=blamed))
    return False


# -- metrics ----------------------------------------------------------------------------------------------------------


def _metrics(update: Update, share: Share) -> Metrics:
    """The metrics of the whole update. Collective."""
    policy, algorithm = update.passes.policy, update.passes.algorithm
    metrics = update.stats.metrics(
        len(next(iter(update.grad_norms.values()))),
        algorithm,
        update.world,
        own_loss=update.passes.loss_function is not None,
    ) | _flops(update)
    if policy.routing is not None:
        metrics |= update.stats.routing_metrics(update.world, balances=update.config.router_aux_loss_coef > 0)
    if update.learner:
        metrics["explained_variance"] = explained_variance(share.samples, algorithm, update.world.total)
    return (
        metrics
        | {name: mean(norms) for name, norms in update.grad_norms.items()}
        | {"nonfinite_minibatches": float(update.skipped), "packed": float(not policy.unpacked)}
    )


def _flops(update: Update) -> Metrics:
    """Floating-point operations of all passes since the last update, those of scoring included, over all ranks, where
    they can be counted. Collective.
    """
    policy = update.passes.policy
    teachers = [one for one in update.passes.teachers.values() if one is not policy]
    models = [(name, body, policy.lm.config.to_dict()) for name, body, _ in update.models]
    models += [(f"teacher {i}", one, one.lm.config.to_dict()) for i, one in enumerate(teachers)]
    counts = update.world.total(
        {f"{name}/{kind}": n for name, body, _ in models for kind, n in body.counted.taken().items()}
    )
    known = all(shape_of(model) is not None for _, _, model in models)
    if policy.unpacked or not known or any(carriers(body.lm) for _, body, _ in models):
        return {}
    passes = ((model, PassCounts.of(counts, f"{name}/")) for name, _, model in models)
    return {"flops": sum(update_flops(model, one, update.config) for model, one in passes)}
