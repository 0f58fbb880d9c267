"""Batches with numbers that are not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentrl.trainer.packing import Sample

POISONED = "g1-t2"
"""A trajectory of `random_samples`."""


def poisoned(samples: Sequence[Sample], trajectory_id: str, value: float = np.nan) -> list[Sample]:
    """The samples, one token of one trajectory recorded with the logprob `value`."""
    out = []
    for sample in samples:
        t = sample.tokens
        if t.trajectory_id == trajectory_id:
            logprobs = t.logprobs.copy()
            logprobs[np.flatnonzero(t.loss_mask)[1]] = value
            sample = dataclasses.replace(sample, tokens=dataclasses.replace(t, logprobs=logprobs))
        out.append(sample)
    return out
