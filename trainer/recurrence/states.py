"""What transformers' layers read their state from and write it to, in place of transformers' cache.

transformers' own cache copies states in place, so that gradients do not flow through them, and keeps them for the next
call. These objects live for one call and change no tensor: B: sequences of a call, D: channels, L: tokens, K: tokens
that a convolution sees before its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(slots=True)
class States:
    """The states of one layer: before a call, and after it.

    A layer may have several convolutions and several recurrences, which it numbers from 0.
    """

    conv_states: dict[int, Tensor] = field(default_factory=dict)  # (B, D, K) the last inputs of each convolution
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)  # (B, …) the state of each recurrence
    record_past: bool = False

    @classmethod
    def joined(cls, found: Sequence[States]) -> States:
        """The states of several sequences as those of one call."""

        def both(name: str) -> dict[int, Tensor]:
            first: dict[int, Tensor] = getattr(found[0], name)
            return {i: torch.cat([getattr(one, name)[i] for one in found]) for i in first}

        return cls(both("conv_states"), both("recurrent_states"))


class Carried:
    """A cache for one layer in one call: it starts from `before`, and `after` holds the states at the end.

    `layers[i]` is the states before the call, whatever the layer.
    """

    def __init__(self, before: States | None) -> None:
        self.before = before
        self.after = States()

    @property
    def layers(self) -> Carried:
        """The states by layer."""
        return self

    def __getitem__(self, layer_idx: int) -> States:
        assert self.before is not None, "a layer asks has_previous_state first"
        return self.before

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the call starts from a state."""
        return self.before is not None

    def update_conv_state(
        self, inputs_BDL: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """(B, D, K + L) the inputs after those before the call; (B, D, L) without any."""
        whole = inputs_BDL
        if self.before is not None:
            whole = torch.cat([self.before.conv_states[state_idx], inputs_BDL], dim=-1)
        seen = conv_kernel_size - 1
        self.after.conv_states[state_idx] = pad(whole, (max(0, seen - whole.shape[-1]), 0))[..., -seen:]
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state at the end of the call."""
        self.after.recurrent_states[state_idx] = state
        return state


class Spliced:
    """A cache for a convolution over a line (state_runs.py): its inputs are 0 where a root has nothing before it."""

    def __init__(self, absent_E: Tensor) -> None:
        self.absent_E = absent_E

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """The line holds all inputs."""
        return False

    def update_conv_state(self, inputs_BDE: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """(B, D, E) the inputs."""
        return inputs_BDE.masked_fill(self.absent_E, 0.0)
