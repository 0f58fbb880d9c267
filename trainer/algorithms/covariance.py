"""Chooses the few tokens that reduce a policy's entropy most, by the covariance of log π and advantage.

arXiv 2505.22617, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models". S: loss tokens of a
rank's minibatch, N: those of all ranks.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from agentrl.domain.schemas import Float32


def covariances(logprobs_S: Tensor, advantages_S: Tensor, means: tuple[float, float]) -> Tensor:
    """(S,) float64 (log π − mean)(A − mean), with the `means` over N tokens."""
    return (logprobs_S.double() - means[0]) * (advantages_S.double() - means[1])


def largest(covariances_N: Tensor, share: float) -> float:
    """The covariance from which on a token is one of the `share` of tokens with the largest ones, at least one token.

    KL-Cov. Equal ones are all taken. Infinite without tokens.
    """
    if not len(covariances_N):
        return float("inf")
    count = max(1, int(len(covariances_N) * share))
    return float(torch.topk(covariances_N, count).values[-1])


def drawn(candidates_N: Tensor, keys_N: Tensor, share: float) -> float:
    """The largest key of the tokens that are drawn: `share` of N tokens, at least one, those of the candidates (bool)
    with the smallest random keys. Clip-Cov. −1 without candidates.
    """
    keys = keys_N[candidates_N].sort().values
    count = min(len(keys), max(1, int(len(keys_N) * share)))
    return float(keys[count - 1]) if count else -1.0


def random_keys(trajectory_id: str, tokens: int, version: int) -> Float32:
    """(tokens,) uniform in [0, 1), the same on whatever rank and in whatever order a trajectory is computed."""
    seed = (zlib.crc32(trajectory_id.encode()), version)
    return np.random.default_rng(seed).random(tokens, dtype=np.float32)
