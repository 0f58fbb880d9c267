"""Chooses tokens of a minibatch by figures of all of its tokens, before its loss: masks, denominators, weights.

    logprobs of the policy ─┬─► second moment (M2PO), covariances (Clip-Cov) ─► keep: tokens with a policy loss
                            ├─► covariances (KL-Cov) ───────────────────────► far: tokens with an additional loss
                            └─► w = π_proximal/π_behaviour ─┬───────────────► counts: tokens in the denominators
                                                            └───────────────► the mean weight

Every rank makes the same choice for a token, however the minibatch is cut. S: loss tokens of a pack, N: of all packs
of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms import covariance
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.bounds import bounded_exp
from agentrl.trainer.algorithms.clipping import SURROGATES
from agentrl.trainer.algorithms.corrections import behavior_weights, second_moment_limit, under_limit
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.batches.share import Pack
from agentrl.trainer.distributed import World
from agentrl.trainer.packing import Microbatch


@dataclass(frozen=True, slots=True)
class Scored:
    """A pack, its tensors but for the tokens, and its logprobs under the policy and the proximal policy."""

    pack: Pack
    advantages_S: Tensor
    behavior_S: Tensor
    logprobs_S: Tensor
    proximal_S: Tensor
    trajectories: Rows
    turns: Rows

    @classmethod
    def of(cls, pack: Pack, m: Microbatch, logprobs_S: Tensor, proximal_S: Tensor) -> Scored:
        """Keeps what a choice needs of a microbatch."""
        rows = Rows(m.trajectories_S, m.sequences), Rows(m.turns_S, m.turns)
        return cls(pack, m.advantages_S, m.behavior_S, logprobs_S, proximal_S, *rows)


def choose_tokens(scored: Sequence[Scored], algorithm: Algorithm, version: int, world: World) -> float:
    """Set `keep_S`, `counts_S` and `far_S` of a minibatch's packs; returns the mean weight, by which weights are
    divided. `version` is the policy's before the step. Collective.
    """
    masks = [_within_second_moment(scored, algorithm, world)]
    if algorithm.clip_cov or algorithm.kl_cov:
        known = _covariances(scored, world)
        masks.append(_not_drawn(scored, known, algorithm, version, world))
        _mark_far(scored, known, algorithm, world)
    found = [[one for one in of_pack if one is not None] for of_pack in zip(*masks, strict=True)]
    for one, kept in zip(scored, found, strict=True):
        one.pack.keep_S = reduce(torch.logical_and, kept) if kept else None
    return _weigh(scored, masks[0], algorithm, world)


def counted(packs: Sequence[Pack], algorithm: Algorithm, world: World) -> Totals:
    """Tokens that count, and trajectories with such tokens, or with loss tokens if all trajectories count, and turns
    with loss tokens, over all ranks. Collective.
    """
    tokens = sequences = turns = 0.0
    for pack in packs:
        turns += sum(int(np.count_nonzero(s.tokens.turn_tokens)) for s in pack.samples)
        if pack.counts_S is None:
            tokens, sequences = tokens + pack.loss_tokens, sequences + len(pack.samples)
            continue
        tokens += float(pack.counts_S.sum())
        if algorithm.masked_in_mean == "trajectories":
            sequences += len(pack.samples)
            continue
        ends = np.cumsum([int(np.count_nonzero(s.tokens.loss_mask)) for s in pack.samples])[:-1]
        sequences += sum(bool(part.any()) for part in np.split(pack.counts_S.cpu().numpy(), ends))
    return Totals(**world.total({"tokens": tokens, "sequences": sequences, "turns": turns}))


Masks = list[Tensor | None]
"""(S,) bool for each pack; None: all tokens."""


def _everyones(parts: Sequence[Tensor], world: World) -> Tensor:
    return world.gather(torch.cat([*parts]) if parts else torch.empty(0))


def _within_second_moment(scored: Sequence[Scored], algorithm: Algorithm, world: World) -> Masks:
    if algorithm.m2_threshold is None:
        return [None] * len(scored)
    log_ratios = [one.logprobs_S - one.behavior_S for one in scored]
    limit = second_moment_limit(_everyones(log_ratios, world), algorithm.m2_threshold)
    return [under_limit(log_ratio_S, limit) for log_ratio_S in log_ratios]


def _covariances(scored: Sequence[Scored], world: World) -> list[Tensor]:
    sums = world.total(
        {
            "tokens": float(sum(len(one.logprobs_S) for one in scored)),
            "logprobs": sum(float(one.logprobs_S.double().sum()) for one in scored),
            "advantages": sum(float(one.advantages_S.double().sum()) for one in scored),
        }
    )
    n = max(1.0, sums["tokens"])
    means = sums["logprobs"] / n, sums["advantages"] / n
    return [covariance.covariances(one.logprobs_S, one.advantages_S, means) for one in scored]


def _not_drawn(
    scored: Sequence[Scored], known: Sequence[Tensor], algorithm: Algorithm, version: int, world: World
) -> Masks:
    if not algorithm.clip_cov:
        return [None] * len(scored)
    candidates, keys = [], []
    for one, covariance_S in zip(scored, known, strict=True):
        ratio_S = bounded_exp(one.logprobs_S - one.proximal_S)
        surrogate = SURROGATES[algorithm.clip]
        _, bound_S = surrogate(ratio_S, one.logprobs_S, one.advantages_S, one.trajectories, algorithm)
        between_S = (covariance_S > algorithm.clip_cov_low) & (covariance_S < algorithm.clip_cov_high)
        candidates.append(between_S & ~bound_S)
        drawn = [
            covariance.random_keys(s.tokens.trajectory_id, len(s.tokens.loss_mask), version)[s.tokens.loss_mask]
            for s in one.pack.samples
        ]
        keys.append(torch.from_numpy(np.concatenate([np.empty(0, np.float32), *drawn])).to(covariance_S.device))
    everyones = _everyones([c.float() for c in candidates], world) > 0
    last = covariance.drawn(everyones, _everyones(keys, world), algorithm.clip_cov)
    return [~(c & (keys_S <= last)) for c, keys_S in zip(candidates, keys, strict=True)]


def _mark_far(scored: Sequence[Scored], known: Sequence[Tensor], algorithm: Algorithm, world: World) -> None:
    if not algorithm.kl_cov:
        return
    least = covariance.largest(_everyones(known, world), algorithm.kl_cov)
    for one, covariance_S in zip(scored, known, strict=True):
        one.pack.far_S = covariance_S >= least


def _weigh(scored: Sequence[Scored], within: Masks, algorithm: Algorithm, world: World) -> float:
    """Sets the tokens that count; returns the mean weight."""
    if algorithm.masked_in_mean == "all" and not algorithm.correction_normalize:
        return 1.0
    tokens = weights = 0.0
    for one, kept in zip(scored, within, strict=True):
        of = (one.trajectories, one.turns)
        weight_S, outside_S = behavior_weights(one.proximal_S, one.behavior_S, *of, algorithm)
        tokens, weights = tokens + len(weight_S), weights + float(weight_S.double().sum())
        if algorithm.masked_in_mean != "all":
            inside_S = ~outside_S if algorithm.correction in ("mask", "reject") else torch.ones_like(outside_S)
            one.pack.counts_S = inside_S if kept is None else inside_S & kept
    if not algorithm.correction_normalize:
        return 1.0
    sums = world.total({"tokens": tokens, "weights": weights})
    return sums["weights"] / sums["tokens"] if sums["weights"] else 1.0
