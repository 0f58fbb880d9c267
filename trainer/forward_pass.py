"""Forward passes of one step's update: logprobs, and a microbatch's share of the policy loss and of the value loss.

Letters as in packing.py: P predictions, S loss tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.corrections import interpolated_proximal
from agentrl.trainer.algorithms.gae import first_of_turns, value_losses
from agentrl.trainer.algorithms.losses import LossTokens, policy_loss
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.algorithms.user_functions import LossFunction, user_loss
from agentrl.trainer.experts.load_balancing import load_balancing_loss, loads
from agentrl.trainer.experts.routers import Choice
from agentrl.trainer.masked_outputs import MeasuredOutputs
from agentrl.trainer.metrics.step_stats import StepStats
from agentrl.trainer.models.critic import Critic
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.nonfinite import Seen
from agentrl.trainer.packing import Microbatch


@dataclass(slots=True)
class Passes:
    """The passes of the policy through one step."""

    policy: Policy
    algorithm: Algorithm
    version: int  # of the policy before the step
    ages: Mapping[int, int]  # weight version that sampled → its age at this step
    loss_function: LossFunction | None = None  # the user's, in place of the algorithm's
    router_aux_loss_coef: float = 0.0
    teachers: Mapping[str, Policy] = field(default_factory=dict)  # by name
    mean_weight: float = 1.0  # of the minibatch, by which behaviour weights are divided
    _versions: tuple[Tensor, Tensor] | None = None  # those of `ages` in ascending order, and their ages

    def logprobs(self, m: Microbatch) -> Tensor:
        """(S,) log π of the loss tokens."""
        logprobs_P, _ = self.policy(m)
        logprobs_S: Tensor = logprobs_P[m.predictions_S]
        return logprobs_S

    def loss(self, m: Microbatch, totals: Totals, progress: float, stats: StepStats) -> Tensor:
        """This microbatch's share of the minibatch's loss. Adds its measurements to `stats`.

        `progress` is the share of the step's optimizer updates that are already made.
        """
        algorithm, lesson = self.algorithm, None
        if m.teacher is not None:
            how = algorithm.distill_divergence, algorithm.distill_top_k
            lesson = self.teachers[m.teacher].lesson(replace(m, routes=None), *how)
        compared_S = m.predictions_S if m.reading is None else m.reading.pairs_S
        with self._observing() as choices:
            logprobs_P, entropy_P, *divergence = self.policy(
                m, entropy_gradient=bool(algorithm.entropy_coef), masked=m.masked, lesson=lesson
            )
        logprobs_S, entropy_S = logprobs_P[m.predictions_S], entropy_P[m.predictions_S]
        measured = self._measured(m, logprobs_P.detach(), entropy_P.detach())
        tokens = LossTokens(
            logprobs_S=logprobs_S,
            proximal_S=self.proximal(logprobs_S.detach(), m, progress),
            behavior_S=m.behavior_S,
            advantages_S=m.advantages_S,
            trajectories=Rows(m.trajectories_S, m.sequences),
            turns=Rows(m.turns_S, m.turns),
            keep_S=m.keep_S,
            counts_S=m.counts_S,
            far_S=m.far_S,
            mean_weight=self.mean_weight,
            reference_S=m.reference_S,
            teacher_S=m.teacher_S,
            before_S=None if m.teacher_S is None else m.proximal_S,
            divergence_S=divergence[0][compared_S] if divergence else None,
            entropy_S=entropy_S,
        )
        if self.loss_function is None:
            loss, sums = policy_loss(tokens, totals, self.algorithm)
        else:
            loss, sums = user_loss(self.loss_function, tokens, totals, self.algorithm)
        sums["entropy"] = entropy_S.detach().double().sum()
        detached = replace(
            tokens,
            logprobs_S=logprobs_S.detach(),
            entropy_S=entropy_S.detach(),
            divergence_S=None if tokens.divergence_S is None else tokens.divergence_S.detach(),
        )
        stats.add_microbatch(m, sums, Seen(m.trajectory_ids, detached, measured))
        if m.proximal_S is not None or not progress:  # logprobs of the policy before the step
            before_S = logprobs_S if m.proximal_S is None else m.proximal_S
            stats.compare(before_S, m, self.version)
        if choices:
            loss = loss + self._balance(choices, m, totals, stats)
        # a microbatch without loss tokens must still take part in the collective calls of the backward pass
        total: Tensor = loss + 0.0 * logprobs_P[: len(m.sources_P)].sum()
        return total

    def _observing(self) -> AbstractContextManager[list[Choice]]:
        routing = self.policy.routing
        return nullcontext([]) if routing is None else routing.observing(logits=self.router_aux_loss_coef > 0)

    def _balance(self, choices: list[Choice], m: Microbatch, totals: Totals, stats: StepStats) -> Tensor:
        """This microbatch's share, by loss tokens, of the load-balancing loss. Adds the experts' loads to `stats`.

        A context rank computes it for its own tokens, and has a share by their number.
        """
        disagreements, share = m.routes.disagreements if m.routes is not None else 0, self.policy.share(m)
        held = len(m.input_ids_N) if share is None else share.held
        if share is not None:
            choices = [choice.first(held) for choice in choices]
        stats.add_routing(loads(choices) * bool(m.trajectory_ids), disagreements)
        if not self.router_aux_loss_coef or not held:
            return m.advantages_S.new_zeros(())
        tokens = len(m.advantages_S) * held / len(m.input_ids_N)
        balance = load_balancing_loss(choices)
        stats.add_balance(balance.detach() * tokens)
        return self.router_aux_loss_coef * tokens / max(1.0, totals.tokens) * balance

    def _measured(self, m: Microbatch, logprobs_P: Tensor, entropy_P: Tensor) -> MeasuredOutputs | None:
        """The facts that the pass found at the masked outputs."""
        if m.masked is None:
            return None
        where_M = m.masked.predictions_M
        return MeasuredOutputs(logprobs_P[where_M], entropy_P[where_M], m.masked.trajectories_M)

    def proximal(self, logprobs_S: Tensor, m: Microbatch, progress: float) -> Tensor:
        """(S,) log π of the proximal policy, which the importance ratio is against."""
        if self.algorithm.proximal == "behavior":
            return m.behavior_S
        if self.algorithm.proximal == "interpolate":
            ages_S = self._ages(m.versions_S)
            return interpolated_proximal(logprobs_S, m.behavior_S, ages_S, progress)
        return logprobs_S if m.proximal_S is None else m.proximal_S

    def _ages(self, versions_S: Tensor) -> Tensor:
        """(S,) int64 ages, looked up on the device."""
        if self._versions is None:
            known = torch.tensor(sorted(self.ages.items()), dtype=torch.int64).reshape(-1, 2)
            on = known.to(versions_S.device)
            self._versions = on[:, 0].contiguous(), on[:, 1]
        versions, ages = self._versions
        found_S: Tensor = ages[torch.searchsorted(versions, versions_S)]
        return found_S


def value_loss(critic: Critic, m: Microbatch, totals: Totals, algorithm: Algorithm, stats: StepStats) -> Tensor:
    """This microbatch's share of the minibatch's value loss, a mean over tokens, or over turns where those have values.
    Called after the policy's pass.
    """
    assert m.values_S is not None
    assert m.targets_S is not None
    values_P = critic(m)
    losses_S = value_losses(values_P[m.predictions_S], m.values_S, m.targets_S, algorithm.value_clip)
    of_S, count = torch.ones_like(losses_S, dtype=torch.bool), totals.tokens
    if algorithm.advantage_level == "turn":
        of_S, count = first_of_turns(m.trajectories_S, m.turns_S), totals.turns
        losses_S = torch.where(of_S, losses_S, 0.0)
    stats.add_value_losses(losses_S.detach(), of_S)
    total: Tensor = losses_S.sum() / max(1.0, count) + 0.0 * values_P.sum()  # as in `Passes.loss`
    return total
