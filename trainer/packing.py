"""Packs a batch into microbatches of tensors: groups become prefix trees, and a microbatch is a forest of them.

T: tokens of one trajectory, N: distinct tokens (nodes of the microbatch's forest), P: distinct predictions, S: loss
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.domain.batching import PrefixTree, balance, build_tree, line_up, pack, split_by_budget
from agentrl.domain.schemas import GREEDY_BELOW, Float32, Int32, TrajectoryTokens
from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.experts.node_routes import NodeRoutes, node_routes
from agentrl.trainer.masked_outputs import Keys, MaskedOutputs, Places, distinct_predictions, on_device

UNPACKED = 0
"""The token budget of models that cannot be packed: a microbatch then has one unit, computed sequence by sequence."""


@dataclass(frozen=True, slots=True)
class Taught:
    """Who teaches a trajectory, and what the teacher reads: the trajectory itself, or the same from its first sampled
    token on, after another prompt.
    """

    teacher: str
    tokens: TrajectoryTokens


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest tokens at each place of a trajectory, as the engine recorded them; ids below 0 where it did not.

    `temperatures` are those of the recorded distributions. K: the most that a place has.
    """

    ids: Int32  # (T, K)
    logprobs: Float32  # (T, K)
    temperatures: Float32  # (T,)


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with the advantage of each token, and with the models' logprobs and values from before the step."""

    tokens: TrajectoryTokens
    advantages: Float32  # (T,) 0 where not sampled
    proximal: Float32 | None = None  # (T,) logprobs of the policy before the step
    reference: Float32 | None = None  # (T,) logprobs of the reference policy
    values: Float32 | None = None  # (T,) values of the critic before the step
    targets: Float32 | None = None  # (T,) targets of the critic
    teacher: Float32 | None = None  # (T,) logprobs of the teacher; NaN where it teaches nothing
    taught: Taught | None = field(default=None, kw_only=True)  # where a teacher's distributions are in the loss
    likeliest: Likeliest | None = field(default=None, kw_only=True)  # with which the policy is compared
    measured: bool = field(default=False, kw_only=True)  # the update also measures its masked outputs

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.tokens.input_ids):
            raise ValueError("one advantage per token")
        if self.tokens.loss_mask[0]:
            raise ValueError(f"trajectory {self.tokens.trajectory_id}: the first token has no context to predict it")


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples of one group that are computed as one tree. Ranks and microbatches receive whole units."""

    samples: list[Sample]
    size: int  # tokens of their tree, each shared one once

    @property
    def group_id(self) -> str:
        """The group of all its samples."""
        return self.samples[0].tokens.group_id

    @property
    def tokens(self) -> int:
        """Tokens of its samples, each shared token counted once per sample: independent of how a group is cut."""
        return sum(len(s.tokens.input_ids) for s in self.samples)


@dataclass(slots=True)
class Reading:
    """What a teacher reads in place of a microbatch's tokens. Q: pairs of a prediction of the policy and one of the
    teacher.
    """

    batch: Microbatch
    own_Q: Tensor  # int64, the policy's predictions
    theirs_Q: Tensor  # int64, the teacher's
    pairs_S: Tensor  # int64, the pair of each loss token

    def to(self, device: torch.device) -> Reading:
        """The same on `device`."""
        own_Q, theirs_Q, pairs_S = (on_device(t, device) for t in (self.own_Q, self.theirs_Q, self.pairs_S))
        return Reading(self.batch.to(device), own_Q, theirs_Q, pairs_S)


@dataclass(slots=True)
class LikelyTokens:
    """The recorded distributions of a microbatch's loss tokens. Q: loss tokens that have one."""

    at_Q: Tensor  # int64, the loss token
    own_Q: Tensor  # int64, its prediction
    temperatures_Q: Tensor  # float32
    ids_QK: Tensor  # int64, below 0: fills up the row
    logprobs_QK: Tensor  # float32

    def to(self, device: torch.device) -> LikelyTokens:
        """The same on `device`."""
        return LikelyTokens(*(on_device(getattr(self, name), device) for name in self.__slots__))


@dataclass(slots=True)
class Microbatch:
    """One forward pass."""

    input_ids_N: Tensor  # int64
    positions_N: Tensor  # int64, depth in the tree
    tree: Tree  # which tokens attend to which
    sources_P: Tensor  # int64, the node whose hidden state predicts
    sources: Places  # (P,) the same on the host
    targets_P: Tensor  # int64, the token predicted
    temperatures_P: Tensor  # float32
    predictions_S: Tensor  # int64, the prediction of each loss token (several samples may share one)
    advantages_S: Tensor  # float32
    behavior_S: Tensor  # float32, logprobs recorded at sampling
    versions_S: Tensor  # int64, weight versions that sampled
    kv_mixed_S: Tensor  # bool, sampled with keys and values that older weights partly computed
    trajectories_S: Tensor  # int64, the trajectory of each loss token, counted from 0; never cut
    turns_S: Tensor  # int64, the turn of each loss token, counted from 0 over all trajectories
    lengths: tuple[int, ...]  # unpacked: of the sequences that make up the N tokens; packed: empty
    trajectory_ids: tuple[str, ...]  # of those trajectories, in their order
    first_turns: tuple[int, ...]  # turns before each of them
    sequences: int  # trajectories with loss tokens
    turns: int  # of those, up to the last with loss tokens
    pairs: int  # of a node and one that it attends to
    proximal_S: Tensor | None = field(default=None)  # float32, set when it is known
    reference_S: Tensor | None = field(default=None)  # float32, where there is a reference policy
    values_S: Tensor | None = field(default=None)  # float32, where there is a critic: its values before the step
    targets_S: Tensor | None = field(default=None)  # float32, where there is a critic
    teacher_S: Tensor | None = field(default=None)  # float32, where teachers' logprobs are in the advantages
    teacher: str | None = field(default=None)  # whose distributions are in the loss
    reading: Reading | None = field(default=None)  # where this teacher reads other prompts
    likely: LikelyTokens | None = field(default=None)  # where samples have recorded distributions
    keep_S: Tensor | None = field(default=None)  # bool, as the next two: set where an algorithm chooses tokens
    counts_S: Tensor | None = field(default=None)
    far_S: Tensor | None = field(default=None)
    masked: MaskedOutputs | None = field(default=None)  # where samples with such tokens are measured
    routes: NodeRoutes | None = field(default=None)  # where trajectories have recorded experts

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on `device`."""
        moved: dict[str, Any] = {
            n: on_device(value, device) for n in self.__slots__ if isinstance(value := getattr(self, n), Tensor)
        }
        parts: dict[str, Any] = {
            "masked": self.masked and self.masked.to(device),
            "routes": self.routes and self.routes.to(device),
            "reading": self.reading and self.reading.to(device),
            "likely": self.likely and self.likely.to(device),
        }
        return replace(self, **moved, tree=self.tree.to(device), **parts)


def make_units(samples: Iterable[Sample], budget: int) -> list[Unit]:
    """The samples of each group as one unit, or as several whose trees hold at most `budget` tokens each. Leaves out
    samples without loss tokens.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.tokens.loss_mask.any():
            groups.setdefault(sample.tokens.group_id, []).append(sample)
    return [
        Unit([members[i] for i in part], size)
        for members in groups.values()
        for part, size in split_by_budget([_used_ids(s) for s in members], budget)
    ]


def _used_ids(sample: Sample) -> Int32:
    """The tokens before the last loss token, which is only predicted: its hidden state is not needed."""
    last = int(np.flatnonzero(sample.tokens.loss_mask)[-1])
    return sample.tokens.input_ids[:last]


def plan(units: Sequence[Unit], *, ranks: int, minibatches: int, budget: int) -> list[list[list[list[Unit]]]]:
    """`plan[minibatch][rank][microbatch]` lists the trees of a microbatch.

    Whole groups go to minibatches, independent of the budget. Trees go to ranks by size, and to microbatches first-fit
    decreasing. Every rank gets the same number of microbatches, since each is collective: a rank with fewer gets empty
    ones, `[]`.
    """
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.group_id, []).append(unit)
    members = list(groups.values())
    out = []
    for chosen in balance([sum(u.tokens for u in m) for m in members], minibatches):
        mine = [u for i in chosen for u in members[i]]
        if not mine:
            continue
        by_rank = []
        for share in balance([u.size for u in mine], ranks):
            packed = pack([mine[i].size for i in share], budget)
            by_rank.append([[mine[share[k]] for k in part] for part in packed])
        longest = max(len(r) for r in by_rank)
        out.append([r + [[]] * (longest - len(r)) for r in by_rank])
    return out


def collate_share(by_rank: Sequence[Sequence[Sequence[Unit]]], rank: int, budget: int) -> list[Microbatch]:
    """A rank's microbatches of one minibatch of `plan`. All ranks make the same number of forward passes."""
    return [
        collate(share[rank], 0 if budget != UNPACKED else max(map(_sequences, share)))
        for share in zip(*by_rank, strict=True)
    ]


def collate(units: Sequence[Unit], passes: int = 0) -> Microbatch:
    """The tensors of the microbatch of some units; `passes` as in `forest`."""
    samples = [s for unit in units for s in unit.samples]
    return microbatch(forest(samples, passes), samples, unpacked=bool(passes))


def forest(samples: Sequence[Sample], passes: int = 0) -> PrefixTree:
    """The tokens to compute. Merges all samples, of whatever group, so that a common prefix, such as a system prompt,
    is computed once. Without samples, one token.

    With `passes`, for an unpacked model: one sequence after another, and one-token sequences to fill up to `passes`.
    """
    if passes:
        return line_up([*map(_used_ids, samples), *[np.zeros(1, np.int32)] * (passes - len(samples))])
    return build_tree([_used_ids(s) for s in samples]) if samples else _EMPTY


def _sequences(units: Sequence[Unit]) -> int:
    """How many sequences the units hold, at least one: every rank must run the blocks."""
    return max(1, sum(len(unit.samples) for unit in units))


_EMPTY = build_tree([np.zeros(1, np.int32)])


def microbatch(tree: PrefixTree, samples: Sequence[Sample], *, unpacked: bool) -> Microbatch:
    """The tensors of a microbatch, from its `forest`."""
    lengths = tuple(len(path) for path in tree.paths) if unpacked else ()
    masks = [np.flatnonzero(s.tokens.loss_mask) for s in samples]
    others = [np.flatnonzero(s.tokens.masked_outputs) if s.measured else np.empty(0, np.int64) for s in samples]
    keys, count, places = distinct_predictions(_keys(samples, tree, masks), _keys(samples, tree, others))
    distinct, masked = keys[:count], None
    tokens = sum(map(len, masks))
    if any(map(len, others)):
        owners = np.repeat(np.arange(len(samples)), [len(where) for where in others])
        masked = MaskedOutputs.of(keys[count:], places[tokens:], owners)

    turns = [s.tokens.turn_ids[w].astype(np.int64) for s, w in zip(samples, masks, strict=True)]
    first = np.cumsum([0, *(len(s.tokens.turn_returns) for s in samples)])  # number of turns before each trajectory

    def flat(arrays: Iterable[np.ndarray[Any, Any]], dtype: type) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
        return found

    def joined(arrays: Iterable[np.ndarray[Any, Any]], dtype: type) -> Tensor:
        return torch.from_numpy(flat(arrays, dtype))

    def known(name: str) -> Tensor | None:
        """The attribute at loss tokens; None where samples do not have it; empty without samples."""
        arrays = [getattr(s, name) for s in samples]
        if arrays and arrays[0] is None:
            return None
        return joined((array[w] for array, w in zip(arrays, masks, strict=True)), np.float32)

    of_trajectories = flat((np.full(len(w), i) for i, w in enumerate(masks)), np.int64)
    of_turns = flat((t + n for t, n in zip(turns, first, strict=False)), np.int64)
    return Microbatch(
        input_ids_N=torch.from_numpy(tree.token_ids.astype(np.int64)),
        positions_N=torch.from_numpy(tree.positions.astype(np.int64)),
        tree=Tree(tree.ends, tree.positions),
        sources_P=torch.from_numpy(distinct[:, 0].astype(np.int64)),
        sources=distinct[:, 0].astype(np.int64),
        targets_P=torch.from_numpy(distinct[:, 1].astype(np.int64)),
        temperatures_P=torch.from_numpy(distinct[:, 2].astype(np.float32)),
        predictions_S=torch.from_numpy(places[:tokens]),
        advantages_S=joined((s.advantages[w] for s, w in zip(samples, masks, strict=True)), np.float32),
        behavior_S=joined((s.tokens.logprobs[w] for s, w in zip(samples, masks, strict=True)), np.float32),
        versions_S=joined((s.tokens.versions[w] for s, w in zip(samples, masks, strict=True)), np.int64),
        kv_mixed_S=joined((s.tokens.kv_mixed[w] for s, w in zip(samples, masks, strict=True)), np.bool_),
        trajectories_S=torch.from_numpy(of_trajectories),
        turns_S=torch.from_numpy(of_turns),
        lengths=lengths,
        trajectory_ids=tuple(s.tokens.trajectory_id for s in samples),
        first_turns=tuple(first[:-1].tolist()),
        sequences=_rows(of_trajectories),
        turns=_rows(of_turns),
        pairs=int(tree.positions.sum(dtype=np.int64)) + len(tree),
        proximal_S=known("proximal"),
        reference_S=known("reference"),
        values_S=known("values"),
        targets_S=known("targets"),
        teacher_S=known("teacher"),
        masked=masked,
        likely=_likely(samples, masks, places[:tokens]),
        routes=node_routes(len(tree), tree.paths, [s.tokens.routed for s in samples]),
    )


def reading_of(own: Microbatch, samples: Sequence[Sample], passes: int = 0) -> Reading | None:
    """The tokens that the teacher of these samples reads; None if they are the microbatch itself. `passes`: see
    `forest`.
    """
    taught = [s.taught for s in samples if s.taught is not None]
    if all(one.tokens is s.tokens for one, s in zip(taught, samples, strict=True)):
        return None
    read = [Sample(one.tokens, np.zeros(one.tokens.length, np.float32)) for one in taught]
    theirs = microbatch(forest(read, passes), read, unpacked=bool(passes))
    width = max(1, len(theirs.sources_P))
    keys_S = own.predictions_S.numpy() * width + theirs.predictions_S.numpy()
    keys_Q, pairs_S = np.unique(keys_S, return_inverse=True)
    parts = (keys_Q // width, keys_Q % width, pairs_S.reshape(-1))
    return Reading(theirs, *(torch.from_numpy(part.astype(np.int64)) for part in parts))


def _likely(samples: Sequence[Sample], masks: Sequence[Places], predictions_S: Places) -> LikelyTokens | None:
    """The recorded distributions at the loss tokens; None where no sample has any."""
    width = max((s.likeliest.ids.shape[1] for s in samples if s.likeliest is not None), default=0)
    if not width:
        return None
    ids_SK = np.full((len(predictions_S), width), -1, np.int64)
    logprobs_SK = np.zeros((len(predictions_S), width), np.float32)
    heat_S, end = np.ones(len(predictions_S), np.float32), 0
    for s, where in zip(samples, masks, strict=True):
        here, end = slice(end, end + len(where)), end + len(where)
        if s.likeliest is not None:
            ids_SK[here, : s.likeliest.ids.shape[1]] = s.likeliest.ids[where]
            logprobs_SK[here, : s.likeliest.ids.shape[1]] = s.likeliest.logprobs[where]
            heat_S[here] = s.likeliest.temperatures[where]
    (at_Q,) = np.nonzero((ids_SK >= 0).any(1))
    heat_Q = np.where(heat_S[at_Q] < GREEDY_BELOW, np.float32(1), heat_S[at_Q])
    found = (at_Q, predictions_S[at_Q].astype(np.int64), heat_Q, ids_SK[at_Q], logprobs_SK[at_Q])
    return LikelyTokens(*map(torch.from_numpy, found))


def _rows(of_S: np.ndarray[Any, Any]) -> int:
    """How many rows ascending row numbers need."""
    return int(of_S[-1]) + 1 if len(of_S) else 0


def _keys(samples: Sequence[Sample], tree: PrefixTree, tokens: Sequence[Places]) -> Keys:
    """What predicts each of some tokens. The engine samples greedily from the distribution at temperature 1."""
    keys = [np.empty((0, 3))]
    for s, path, where in zip(samples, tree.paths, tokens, strict=False):  # a microbatch without samples has one path
        asked = s.tokens.temperatures[where]
        temperatures = np.where(asked < GREEDY_BELOW, np.float32(1), asked)
        keys.append(np.stack([path[where - 1], s.tokens.input_ids[where], temperatures], 1, dtype=np.float64))
    return np.concatenate(keys)
