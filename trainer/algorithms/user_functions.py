"""Functions of the user in place of parts of an algorithm: `trainer.algorithm.loss` and `trainer.algorithm.advantage`.

S: loss tokens of one microbatch. T: tokens of a trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Float32, TrajectoryTokens
from agentrl.errors import UserError
from agentrl.trainer.algorithms.advantages import token_advantages
from agentrl.trainer.algorithms.aggregation import Totals, token_weights
from agentrl.trainer.algorithms.losses import LossTokens, Sums, behavior_kl
from agentrl.user_code import load_function

LOSS, ADVANTAGE = "trainer.algorithm.loss", "trainer.algorithm.advantage"
PREFIX = "loss/"
"""Before the names of metrics that a loss function returns."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
MOST_METRICS = 64

LossFunction = Callable[[LossTokens, Totals, Algorithm], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]
"""(tokens, totals, algorithm) → the loss, or the loss and metrics.

It gets the loss tokens of one microbatch; a step has many, on all ranks, and their gradients are added. So it returns
either the losses of the tokens, (S,), which `aggregation` reduces as it does the built-in ones, or this microbatch's
share of the loss of the whole minibatch, a scalar: a sum over tokens or trajectories divided by `totals.tokens` or
`totals.sequences`, which count those of the minibatch over all microbatches and ranks. A mean over the tokens at hand
would weigh tokens by how the batch happens to be cut. It is not called for a microbatch without loss tokens. Metrics
are sums over the tokens at hand; the step's metric `loss/NAME` is their total, divided by all loss tokens.
"""
AdvantageFunction = Callable[[Sequence[TrajectoryTokens], Algorithm], Sequence[Any]]
"""(trajectories, algorithm) → for each trajectory, in order, its advantages: (n_turns,), one for each of its calls, or
(T,), one for each token. It gets the whole batch, and is called once for a step, on rank 0.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Functions:
    """The functions of the user that replace parts of an algorithm; None: the parts."""

    loss: LossFunction | None = None
    advantage: AdvantageFunction | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> Functions:
        """The functions that a configuration names. Raises UserError when one cannot be loaded."""
        return cls(
            loss=None if algorithm.loss is None else load_function(algorithm.loss, LOSS),
            advantage=None if algorithm.advantage is None else load_function(algorithm.advantage, ADVANTAGE),
        )


def user_loss(function: LossFunction, tokens: LossTokens, totals: Totals, algorithm: Algorithm) -> tuple[Tensor, Sums]:
    """As `policy_loss`: this microbatch's share of the minibatch's loss, and metrics. Raises UserError."""
    if not len(tokens.advantages_S):
        nothing = tokens.logprobs_S.sum()
        return nothing, {"loss": nothing.detach().double()}
    returned = function(tokens, totals, algorithm)
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor) or loss.shape not in ((), tokens.logprobs_S.shape):
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"{LOSS}: returned {shape}, not a scalar tensor or one loss for each of the tokens")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(f"{LOSS}: the loss has no gradient; compute it from tokens.logprobs_S")
    if loss.ndim:
        loss = (token_weights(loss, tokens.trajectories, totals, algorithm, tokens.counts_S) * loss).sum()
    sums: Sums = {f"{PREFIX}{name}": _number(name, value) for name, value in _bounded(metrics).items()}
    return loss, sums | {"loss": loss.detach().double(), "approx_kl": behavior_kl(tokens).sum()}


def user_advantages(
    function: AdvantageFunction, trajectories: Sequence[TrajectoryTokens], algorithm: Algorithm
) -> list[Float32]:
    """Per trajectory, (T,) advantages; 0 for tokens that were not sampled. Raises UserError."""
    returned = function(trajectories, algorithm)
    if len(returned) != len(trajectories):
        raise UserError(f"{ADVANTAGE}: returned {len(returned)} items for {len(trajectories)} trajectories")
    found = []
    for trajectory, advantages in zip(trajectories, returned, strict=True):
        one = np.asarray(advantages, np.float32)
        if one.shape == trajectory.turn_ids.shape:
            found.append(np.where(trajectory.turn_ids >= 0, one, np.float32(0)))
        elif one.shape == trajectory.turn_returns.shape:
            found.append(token_advantages(trajectory, one))
        else:
            turns, tokens = len(trajectory.turn_returns), len(trajectory.turn_ids)
            raise UserError(
                f"{ADVANTAGE}: returned shape {one.shape} for trajectory {trajectory.trajectory_id}, "
                f"which has {turns} turns and {tokens} tokens"
            )
    return found


def _bounded(metrics: Any) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping) or len(metrics) > MOST_METRICS:
        raise UserError(f"{LOSS}: metrics must be a mapping of at most {MOST_METRICS} names")
    for name in metrics:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"{LOSS}: {name!r} is no name of a metric (letters, digits and . _ / -)")
    return metrics


def _number(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach().double().reshape(())
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{LOSS}: the metric {name!r} is not a number: {error}") from error
