"""Losses and gradients that are NaN or infinite: reports them, and finds the trajectories that caused them.

S: loss tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.errors import NonFiniteError
from agentrl.trainer.algorithms.losses import LossTokens, token_losses
from agentrl.trainer.distributed import World
from agentrl.trainer.masked_outputs import MeasuredOutputs

NAMED = 5
"""How many trajectories a message names. The event names all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """A loss or gradient that is not finite. Equal on every rank."""

    where: str
    figures: dict[str, float]
    trajectories: tuple[str, ...]

    def __str__(self) -> str:
        named = ", ".join(self.trajectories[:NAMED])
        more = len(self.trajectories) - NAMED
        return (
            f"not finite in {self.where}: {', '.join(f'{name} {value:g}' for name, value in self.figures.items())}; "
            f"trajectories: {named or 'none by itself'}{f' and {more} more' if more > 0 else ''}"
        )


OnNonFinite = Callable[[NonFinite], None]
"""Raises, on every rank, to stop the run. If it returns, the minibatch is skipped."""


def stop(found: NonFinite) -> None:
    """Raise NonFiniteError."""
    raise NonFiniteError(str(found))


@dataclass(slots=True)
class Seen:
    """Loss tokens of one microbatch after its forward pass, without the autograd graph."""

    trajectory_ids: tuple[str, ...]
    tokens: LossTokens
    measured: MeasuredOutputs | None = None  # of sampled tokens out of the loss
    value_losses_S: Tensor | None = None


@torch.no_grad()
def culprits(seen: Iterable[Seen], algorithm: Algorithm | None, world: World) -> tuple[str, ...]:
    """All ranks' trajectories with logprobs that are not finite or, without any, with such losses. Collective.

    The losses are those of `algorithm`; None for a loss function of the user, whose losses of tokens are unknown.
    """
    by_logprob: set[str] = set()
    by_loss: set[str] = set()
    for s in seen:
        t = s.tokens
        by_logprob |= _with_nonfinite(s, (t.logprobs_S, t.proximal_S, t.behavior_S, t.reference_S, t.entropy_S))
        loss_S = None if algorithm is None else token_losses(t, algorithm)[0]
        by_loss |= _with_nonfinite(s, (t.advantages_S, loss_S, s.value_losses_S))
    everyones = world.everyones((by_logprob, by_loss))
    named = set().union(*(own for own, _ in everyones)) or set().union(*(loss for _, loss in everyones))
    return tuple(sorted(named))


def _with_nonfinite(seen: Seen, figures: Iterable[Tensor | None]) -> set[str]:
    """Trajectories that have a token with a figure that is not finite."""
    bad_S = torch.zeros(len(seen.tokens.logprobs_S), dtype=torch.bool, device=seen.tokens.logprobs_S.device)
    for figure_S in figures:
        if figure_S is not None:
            bad_S |= ~figure_S.isfinite()
    return {seen.trajectory_ids[i] for i in set(seen.tokens.trajectories.of_S[bad_S].tolist())}
