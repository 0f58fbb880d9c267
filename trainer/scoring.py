"""Makes this rank's share of a batch: reads its trajectories, computes the models' logprobs and values before the
update, and makes samples with advantages from them.

    outlines ─► advantages of returns ─► shares ─► this rank reads its trajectories ─► samples
                                                      └► logprobs, values ─► advantages of costs or of a critic

Only the quantities that the algorithm needs are computed. Advantages do not depend on how the batch was cut: what they
need of all trajectories is in the outlines, or is a sum over ranks. T, S: as in packing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.batches.outline import Credited, Outline
from agentrl.domain.batches.rank_shares import Cut, cut_outlines, group_tokens, ranks_of
from agentrl.domain.schemas import PROMPT_VERSION, Float32, TrajectoryTokens
from agentrl.errors import NonFiniteError
from agentrl.trainer.algorithms.advantages import penalized_advantages, token_advantages, turn_advantages
from agentrl.trainer.algorithms.gae import gae_advantages
from agentrl.trainer.algorithms.kl import kl_divergence, taught_advantages
from agentrl.trainer.algorithms.user_functions import AdvantageFunction, user_advantages
from agentrl.trainer.batches.share import Pack, Share, built, cut_arrays, packs_of
from agentrl.trainer.batches.step_times import StepTimes
from agentrl.trainer.distributed import World
from agentrl.trainer.models.critic import Critic
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.run_models import Models
from agentrl.trainer.models.sharding import reshard
from agentrl.trainer.packing import Microbatch, Sample, Taught
from agentrl.trainer.teachers.lessons import Lessons, moved, not_taught

Scores = list[Float32]
"""(T,) per trajectory of this rank's share; 0 at tokens that are not loss tokens."""
Read = Callable[[Sequence[int]], Iterable[TrajectoryTokens]]
"""The trajectories of a batch at some indices, in order."""


def make_samples(
    trajectories: Sequence[TrajectoryTokens],
    algorithm: Algorithm,
    models: Models,
    budget: int,
    world: World,
    advantage: AdvantageFunction | None = None,
    minibatches: int = 1,
    lessons: Lessons | None = None,
) -> Share:
    """`make_share` of a batch that every rank has. Collective."""
    return make_share(
        trajectories,
        lambda indices: (trajectories[i] for i in indices),
        algorithm,
        models,
        budget,
        minibatches,
        world,
        advantage,
        lessons=lessons,
    )


def make_share(
    batch: Sequence[Credited],
    read: Read,
    algorithm: Algorithm,
    models: Models,
    budget: int,
    minibatches: int,
    world: World,
    advantage: AdvantageFunction | None = None,
    times: StepTimes | None = None,
    lessons: Lessons | None = None,
) -> Share:
    """This rank's share of a batch: its samples, with advantages, and with the logprobs and values that the update
    needs. `advantage` is the user's function, in place of the algorithm's estimator. Without `lessons` a single teacher
    teaches everything. Collective.
    """
    times = times or StepTimes(world.device)
    with times.reading("read"):
        groups, packed = group_tokens(batch), models.policy.budget(budget)
        user, flags = (None, None) if advantage is None else _of_user(advantage, batch, read, algorithm, world)
        ranks = planned_ranks(batch, algorithm, minibatches, packed, world.data_size, flags)
        trained = [i for i, one in enumerate(batch) if one.computed_tokens]
        by_rank = [[i for i in trained if ranks[i] == rank] for rank in range(world.data_size)]
        mine = by_rank[world.data_rank]
        trajectories = world.together(lambda: list(read(mine)))
    known: list[Float32] | None = None
    if advantage is not None:
        known = _dealt(user, by_rank, batch, world)
    elif not scored_first(algorithm):
        turns = turn_advantages(batch, algorithm)
        known = [token_advantages(t, turns[i]) for i, t in zip(mine, trajectories, strict=True)]
    if algorithm.distill_coef and lessons is None:
        (teacher,) = models.teachers
        lessons = Lessons(teacher)
    scored = _scored(batch, trajectories, known, algorithm, models, lessons, packed, world, times)
    return Share(scored, mine, groups)


def planned_ranks(
    batch: Sequence[Credited],
    algorithm: Algorithm,
    minibatches: int,
    budget: int,
    ranks: int,
    teaches: Sequence[bool] | None = None,
) -> list[int]:
    """The rank that trains each trajectory. `teaches` says which have an advantage, where a function of the user
    computes them. Before advantages that need logprobs or values, every group counts as one that teaches.
    """
    teaching = {one.group_id for one in batch}
    if teaches is None and not (algorithm.trains_every_token or scored_first(algorithm)):
        turns = turn_advantages(batch, algorithm)
        teaches = [bool(a[one.turn_tokens > 0].any()) for one, a in zip(batch, turns, strict=True)]
    if teaches is not None and not algorithm.trains_every_token:
        teaching = {one.group_id for one, does in zip(batch, teaches, strict=True) if does}
    return ranks_of(batch, _cut(batch), teaching, ranks=ranks, minibatches=minibatches, budget=budget)


def scored_first(algorithm: Algorithm) -> bool:
    """Whether advantages need logprobs or values of the models."""
    return algorithm.needs_critic or (algorithm.needs_reference and algorithm.kl == "reward")


def _cut(batch: Sequence[Credited]) -> Cut:
    outlines = [one for one in batch if isinstance(one, Outline)]
    return cut_outlines(outlines) if outlines else cut_arrays([t for t in batch if isinstance(t, TrajectoryTokens)])


def _scored(
    batch: Sequence[Credited],
    trajectories: Sequence[TrajectoryTokens],
    advantages: Sequence[Float32] | None,
    algorithm: Algorithm,
    models: Models,
    lessons: Lessons | None,
    budget: int,
    world: World,
    times: StepTimes,
) -> list[Sample]:
    """This rank's samples; `advantages` are None where they depend on logprobs or values. Collective."""
    scorer = Scorer(trajectories, budget, world, times)
    reference = logprobs = values = targets = costs = teacher = None
    with times.reading("read"):
        taught = [] if lessons is None else world.together(partial(lessons.of, trajectories))
    if algorithm.needs_reference:
        assert models.reference is not None
        with models.reference.in_place():
            reference = scorer.score(lambda m: models.policy(replace(m, routes=None))[0])  # routing_replay.py
    if algorithm.teaches_tokens or (algorithm.needs_reference and algorithm.kl == "reward"):
        logprobs = scorer.score(lambda m: models.policy(m)[0])
        reshard(models.policy)
        if reference is not None and algorithm.kl == "reward":
            costs = [_cost(a, b, algorithm) for a, b in zip(logprobs, reference, strict=True)]
    if algorithm.teaches_tokens:
        assert lessons is not None
        teacher = _of_teachers(trajectories, taught, models, lessons, budget, world, times)
    if advantages is None and algorithm.needs_critic:
        assert models.critic is not None
        ends = None
        if algorithm.bootstrap_truncated:
            values, ends = _values_to_the_end(trajectories, models.critic.critic, budget, world, times)
        else:
            values = scorer.score(models.critic.critic)
        reshard(models.critic.critic)
        advantages, targets = gae_advantages(trajectories, algorithm, values, costs, batch, world.total, ends)
    elif advantages is None:
        assert costs is not None
        advantages = penalized_advantages(trajectories, algorithm, costs, batch, world.total)
    if algorithm.reward_weight != 1:
        advantages = [np.float32(algorithm.reward_weight) * advantages_T for advantages_T in advantages]
    if teacher is not None and logprobs is not None:
        advantages = [taught_advantages(*one, algorithm) for one in zip(advantages, logprobs, teacher, strict=True)]
    scores = (logprobs, reference, values, targets, teacher)
    lessons_of = taught if algorithm.compares_vocabularies else [None] * len(trajectories)
    return [
        Sample(t, advantages[i], *(found[i] if found else None for found in scores), taught=lessons_of[i])
        for i, t in enumerate(trajectories)
    ]


def _of_teachers(
    trajectories: Sequence[TrajectoryTokens],
    taught: Sequence[Taught | None],
    models: Models,
    lessons: Lessons,
    budget: int,
    world: World,
    times: StepTimes,
) -> Scores:
    """(T,) the logprobs of each trajectory's teacher at loss tokens, NaN where it has none. Each teacher reads only the
    trajectories that it teaches. Collective.
    """
    found = [not_taught(one) for one in trajectories]
    for name in lessons.teachers:
        mine = {i: one.tokens for i, one in enumerate(taught) if one is not None and one.teacher == name}
        scores = (
            _scores_of(models.teachers[name], [*mine.values()], budget, world, times)
            if name in models.teachers
            else lessons.asked(name, [*mine.values()])
        )
        by_id = {trajectories[i].trajectory_id: own for i, own in zip(mine, scores, strict=True)}
        world.together(partial(check_finite, name, by_id))
        for i, own in zip(mine, scores, strict=True):
            found[i] = np.where(trajectories[i].loss_mask, moved(own, trajectories[i]), np.float32(0))
    return found


def check_finite(teacher: str, scores: Mapping[str, Float32]) -> None:
    """Raise NonFiniteError for a trajectory with a logprob of its teacher that is NaN or infinite."""
    for trajectory_id, own in scores.items():
        odd = own[~np.isfinite(own)]
        if len(odd):
            raise NonFiniteError(f"trainer.teacher: {teacher} scored trajectory {trajectory_id} with {odd[0]:g}")


def _scores_of(
    teacher: Policy, read: Sequence[TrajectoryTokens], budget: int, world: World, times: StepTimes
) -> Scores:
    scores = Scorer(read, budget, world, times).score(lambda m: teacher(replace(m, routes=None))[0])
    reshard(teacher)
    return scores


def _values_to_the_end(
    trajectories: Sequence[TrajectoryTokens], critic: Critic, budget: int, world: World, times: StepTimes
) -> tuple[Scores, list[float]]:
    """The critic's values, and by trajectory that of the state after its last token where a limit ended the episode
    there; 0 elsewhere. Collective.
    """
    longer = [_with_end(t) if t.truncated else replace(t, routed=None) for t in trajectories]
    scores = Scorer(longer, budget, world, times).score(critic)
    ends = [float(s[-1]) if t.truncated else 0.0 for s, t in zip(scores, trajectories, strict=True)]
    return [s[: t.length] for s, t in zip(scores, trajectories, strict=True)], ends


def _with_end(t: TrajectoryTokens) -> TrajectoryTokens:
    """The trajectory and one more loss token, which is only predicted: its value is that of the state at the end."""
    return replace(
        t,
        input_ids=np.append(t.input_ids, np.int32(0)),
        loss_mask=np.append(t.loss_mask, True),
        logprobs=np.append(t.logprobs, np.float32(0)),
        versions=np.append(t.versions, np.int32(PROMPT_VERSION)),
        turn_ids=np.append(t.turn_ids, t.turn_ids.max()),
        temperatures=np.append(t.temperatures, np.float32(1)),
        routed=None,
    )


def _of_user(
    function: AdvantageFunction,
    batch: Sequence[Credited],
    read: Read,
    algorithm: Algorithm,
    world: World,
) -> tuple[list[Float32] | None, list[bool]]:
    """On rank 0, which reads the whole batch for it, the (T,) advantages of the user's function; on every rank, which
    trajectories they teach. Collective.
    """
    found: list[Float32] = []

    def work() -> list[bool]:
        trajectories = list(read(range(len(batch))))
        found.extend(user_advantages(function, trajectories, algorithm))
        return [bool(a[t.loss_mask].any()) for a, t in zip(found, trajectories, strict=True)]

    flags: list[bool] = world.from_leader(work)
    return (found if world.leads else None), flags


def _dealt(
    whole: Sequence[Float32] | None, by_rank: Sequence[Sequence[int]], batch: Sequence[Credited], world: World
) -> list[Float32]:
    """The advantages of this rank's share, from rank 0, which has those of the `whole` batch. Collective."""
    mine: list[Float32] = []
    for rank, indices in enumerate(by_rank):
        lengths = [batch[i].length for i in indices]
        flat = np.concatenate([np.empty(0, np.float32), *(whole[i] for i in indices)]) if whole is not None else None
        sent = world.broadcast(flat, sum(lengths))
        if rank == world.data_rank:
            mine = np.split(sent, np.cumsum(lengths)[:-1]) if lengths else []
    return mine


def _cost(logprobs_T: Float32, reference_T: Float32, algorithm: Algorithm) -> Float32:
    """(T,) the KL penalty β · KL_t of each token; 0 where both logprobs are 0."""
    kl_T = kl_divergence(torch.from_numpy(logprobs_T), torch.from_numpy(reference_T), algorithm.kl_estimator)
    cost_T: Float32 = (algorithm.kl_coef * kl_T).numpy()
    return cost_T


class Scorer:
    """The microbatches of this rank's share, for several forward passes without gradients."""

    def __init__(
        self, trajectories: Sequence[TrajectoryTokens], budget: int, world: World, times: StepTimes | None = None
    ) -> None:
        self._samples = [Sample(t, np.zeros(len(t.input_ids), np.float32)) for t in trajectories]
        self._budget, self._world, self._times = budget, world, times or StepTimes(world.device)
        self._packs: list[Pack] | None = None

    @torch.no_grad()
    def score(self, model: Callable[[Microbatch], Tensor]) -> Scores:
        """The output of `model`, (P,) per prediction, at every loss token of the share. Collective."""
        if self._packs is None:
            with self._times.reading("build"):
                (self._packs,) = packs_of([self._samples], self._budget, self._world)
        found: dict[int, Float32] = {}
        for pack, m in built(self._packs, self._world.device, self._times, last=False):
            with self._times.reading("forward"):
                of_predictions = model(m)
            scores_S, at = of_predictions[m.predictions_S].float().cpu().numpy(), 0
            for sample in pack.samples:
                mask = sample.tokens.loss_mask
                scores = found[id(sample)] = np.zeros(len(mask), np.float32)
                scores[mask] = scores_S[at : (at := at + int(np.count_nonzero(mask)))]
        return [found[id(s)] for s in self._samples]
