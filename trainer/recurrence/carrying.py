"""Makes the layers of a model that have a state follow the forest of a microbatch.

    block(hidden_1NH, tree=…) ─► its layer with a state ─► runs of the forest, each from the state of its parent
                                                          or, for a convolution alone, one line
                              ─► its attention ─► attention/tree_attention.py

Without a tree a layer computes as before. Activation checkpointing computes a block again with the same arguments, and
a run's states live in that call only, so the second pass equals the first. N: tokens, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.recurrence.state_runs import NO_STATE, Run, line, places, runs
from agentrl.trainer.recurrence.states import Carried, Spliced, States

RECURRENT = frozenset(
    {
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "KimiLinearDeltaAttention",
        "Mamba2Mixer",
        "NemotronHMamba2Mixer",
        "OlmoHybridGatedDeltaNet",
        "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "Zamba2MambaMixer",
    }
)
"""transformers' layers with a recurrent state, which several tokens can continue. (Mamba 1 continues one at a time.)"""
CONVOLUTIONS = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})
"""transformers' layers whose only state is the last inputs of a convolution."""


def carriers(module: nn.Module) -> list[Any]:
    """The layers inside `module` whose state is carried along a forest."""
    return [m for m in module.modules() if type(m).__name__ in RECURRENT | CONVOLUTIONS]


def carry(blocks: Iterable[nn.Module]) -> None:
    """Make the layers with a state in `blocks` follow the forest that a block gets as `tree`."""
    computing = Computing()
    layers = {block: carriers(block) for block in blocks}
    for layer in dict.fromkeys(layer for found in layers.values() for layer in found):  # blocks may share one
        along = _along_runs if type(layer).__name__ in RECURRENT else _along_line
        layer.forward = partial(_forward, computing, along, layer, layer.forward)
    for block, found in layers.items():
        if found:
            block.forward = partial(computing.block, block.forward)


class Cut:
    """A forest in runs and lines, as tensors on its device."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.runs: list[Run] = runs(tree.chains)
        self.run_tokens: list[Tensor] = [self._on_device(run.tokens_RL) for run in self.runs]
        self.run_places_N = self._on_device(places(self.runs, len(tree.ends_N)))
        self._lines: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def line(self, kernel: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of the line for a kernel's size, where it has none, and the places of the forest's tokens."""
        if kernel not in self._lines:
            made = line(self.tree.chains, kernel)
            tokens_E, absent_E, places_N = map(self._on_device, (made.tokens_E, ~made.given_E, made.places_N))
            self._lines[kernel] = tokens_E, absent_E, places_N
        return self._lines[kernel]

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.tree.device, non_blocking=True)


class Computing:
    """The forest of the block that computes now. Its layers ask here, since not every block passes `tree` to them."""

    def __init__(self) -> None:
        self.cut: Cut | None = None
        self._last: Cut | None = None  # the next block most likely computes with the same forest

    def block(self, own: Callable[..., Any], *args: Any, tree: Tree | None = None, **kwargs: Any) -> Any:
        """Call a block's own forward."""
        if tree is None:
            return own(*args, **kwargs)
        if self._last is None or self._last.tree is not tree:
            self._last = Cut(tree)
        self.cut = self._last
        try:
            return own(*args, tree=tree, **kwargs)
        finally:
            self.cut = None


Along = Callable[[Cut, Any, Callable[..., Tensor], Tensor], Tensor]
"""Computes (1, N, H) from (1, N, H) along a forest, by a layer and its own forward."""


def _forward(
    computing: Computing,
    along: Along,
    layer: nn.Module,
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """A layer's forward: along the forest if there is one, else its own."""
    if computing.cut is None:
        return own(hidden_states, *args, **kwargs)
    return along(computing.cut, layer, own, hidden_states)


def _along_runs(cut: Cut, layer: nn.Module, own: Callable[..., Tensor], hidden_1NH: Tensor) -> Tensor:
    after: dict[int, States] = {}
    outputs = []
    for run, tokens_RL in zip(cut.runs, cut.run_tokens, strict=True):
        before = States.joined([after[i] for i in run.before]) if run.starts_from_states else None
        carried = Carried(before)
        hidden_RLH = hidden_1NH[0].index_select(0, tokens_RL.flatten()).view(*tokens_RL.shape, -1)
        out_RLH = own(hidden_RLH, cache_params=carried)
        outputs.append(out_RLH.flatten(0, 1))
        if run.after != NO_STATE:
            after[run.after] = carried.after
    return torch.cat(outputs).index_select(0, cut.run_places_N)[None]


def _along_line(cut: Cut, layer: Any, own: Callable[..., Tensor], hidden_1NH: Tensor) -> Tensor:
    tokens_E, absent_E, places_N = cut.line(layer.conv.kernel_size[0])
    out_1EH = own(hidden_1NH.index_select(1, tokens_E), past_key_values=Spliced(absent_E))
    return out_1EH.index_select(1, places_N)
