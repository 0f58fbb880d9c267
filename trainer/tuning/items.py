"""Items to learn from: an item holds the samples of one conversation or of one pair.

A sample's advantages are the weights of its loss tokens: 1 in SFT, and in a pair +1 on the chosen and −1 on the
rejected answer. The sum of advantages times logprobs is then the pair's margin.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentrl.domain.schemas import PROMPT_VERSION, Float32, TrajectoryTokens
from agentrl.errors import UserError
from agentrl.trainer.packing import Likeliest, Sample

Item = list[Sample]
"""Samples of one group. The two samples of a pair are computed together."""


@dataclass(frozen=True, slots=True)
class Data:
    """The items to train and those to score only. `notes` say which items were left out, and why."""

    train: list[Item]
    held_out: list[Item]
    notes: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """32 hex digits over every token and mask of every item, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for item in (*self.train, *self.held_out):
            for sample in item:
                arrays = [sample.tokens.input_ids, sample.tokens.loss_mask, sample.advantages]
                if sample.likeliest is not None:
                    arrays += [sample.likeliest.ids, sample.likeliest.logprobs, sample.likeliest.temperatures]
                for array in arrays:
                    digest.update(len(array).to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()


def make_sample(ids: Sequence[int], mask: Sequence[bool], *, group: str, name: str) -> Sample:
    """A sample of tokens that no recorded policy sampled, with advantage 1 at trained tokens."""
    n = len(ids)
    tokens = TrajectoryTokens(
        trajectory_id=name,
        session_id=name,
        episode_id=name,
        group_id=group,
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.bool_),
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, PROMPT_VERSION, np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(n, np.float32),
        turn_returns=np.zeros(1),
        episode_return=0.0,
    )
    return Sample(tokens, _ones(tokens))


def imitated(tokens: TrajectoryTokens, likeliest: Likeliest | None = None) -> Sample:
    """A recorded trajectory as a sample to imitate: its tokens at temperature 1, and its distributions, where they were
    recorded, at their own.
    """
    plain = dataclasses.replace(tokens, temperatures=np.ones_like(tokens.temperatures))
    return Sample(plain, _ones(tokens), likeliest=likeliest)


def pair(chosen: Sample, rejected: Sample, group: str) -> Item:
    """An item of two samples of one group, the second with advantage −1."""
    return [_signed(chosen, 1.0, group), _signed(rejected, -1.0, group)]


def _ones(tokens: TrajectoryTokens) -> Float32:
    return tokens.loss_mask.astype(np.float32)


def _signed(sample: Sample, sign: float, group: str) -> Sample:
    tokens = dataclasses.replace(sample.tokens, group_id=group)
    return Sample(tokens, np.float32(sign) * _ones(tokens))


def split(items: Sequence[Item], held_out: int, seed: int, notes: list[str]) -> Data:
    """Hold out items chosen by the seed. Raises UserError when none are left to train."""
    if len(items) <= held_out:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise UserError(f"data: {len(items)} items{why}, of which held_out takes {held_out}: none are left to train")
    aside = set(random.Random(f"{seed} held out").sample(range(len(items)), held_out))
    kept = [item for i, item in enumerate(items) if i not in aside]
    return Data(kept, [item for i, item in enumerate(items) if i in aside], notes)
