"""The policy: a causal language model of transformers, asked for logprobs only.

A `Body` is what other models of the trainer share with it: the blocks, and how they read a microbatch.

packed    rows of prefix trees through our attention: what sequences share is computed once
unpacked  every sequence by itself, through transformers' own forward: for models that mix tokens in other ways

Which of the two is decided when a model is loaded (packing_probe.py). H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from agentrl.trainer.models import attention, mechanisms
from agentrl.trainer.models.attention import Rows, tree_mask
from agentrl.trainer.models.head import token_logprobs
from agentrl.trainer.models.tensor_naming import Names
from agentrl.trainer.packing import UNPACKED, Microbatch

T = TypeVar("T")


def decoder(lm: Any) -> Any:
    """The blocks of a causal LM with what is before and behind them: all but its head."""
    base = lm.base_model
    return lm.model if base is lm and hasattr(lm, "model") else base


class Body(nn.Module):
    """A model of transformers that reads microbatches."""

    names: Names
    """What the tensors of the folder that it was loaded from are in it."""
    unpacked: str = ""
    """Why sequences are not packed; empty where they are."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self._own_attention = mechanisms.attention_of(lm)

    @property
    def blocks(self) -> Any:
        """The model without its head."""
        return decoder(self.lm)

    def read(self, unpacked: str = "", *, plainly: bool = False) -> None:
        """Read packed microbatches or, for the reason that is given, unpacked ones.

        `plainly`: from now on with the attention of the model's own file, which knows all of its arguments.
        """
        self.unpacked = unpacked
        self._own_attention = mechanisms.PLAIN if plainly else self._own_attention
        self.lm.set_attn_implementation(self._own_attention if unpacked else attention.NAME)

    def budget(self, tokens: int) -> int:
        """How its batches are cut where a microbatch may have so many tokens."""
        return UNPACKED if self.unpacked else tokens

    def within(self, compute: Callable[[], T]) -> T:
        """Call `compute` as a forward pass of this model: FSDP root, weights gathered where blocks are called."""
        return compute()

    def hidden(self, batch: Microbatch) -> Tensor:
        """(N, H) the last hidden states of the microbatch's tokens."""
        assert bool(batch.lengths) == bool(self.unpacked), "a batch is cut by its model's budget"
        if batch.lengths:
            return torch.cat([self.alone(ids_T) for ids_T in torch.split(batch.input_ids_N, list(batch.lengths))])
        return self.packed(batch, self.rows(batch))

    def rows(self, batch: Microbatch) -> Rows:
        """How the tokens of a packed microbatch attend."""
        mask_B1LL = tree_mask(batch.ends_BL, self.lm.get_input_embeddings().weight.dtype)
        return Rows(batch.nodes_BL, batch.homes_N, mask_B1LL, batch.positions_N, int(batch.positions_N.max()) + 1)

    def packed(self, batch: Microbatch, rows: Rows) -> Tensor:
        """(N, H) of the rows of a microbatch."""
        hidden_NH: Tensor = self.blocks(
            input_ids=batch.input_ids_N[None],
            position_ids=batch.positions_N[None],
            attention_mask=rows.mask_B1LL,  # used as it is: four dimensions tell transformers to build none
            use_cache=False,
            rows=rows,
        ).last_hidden_state[0]
        return hidden_NH

    def alone(self, ids_T: Tensor) -> Tensor:
        """(T, H) of one sequence, by transformers alone."""
        hidden_TH: Tensor = self.blocks(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        return hidden_TH

    def sources(self, batch: Microbatch) -> Tensor:
        """(P, H) the hidden states that the microbatch's predictions are made from."""
        return self.hidden(batch)[batch.sources_P]

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by their Hugging Face name, in a fixed order."""
        for name, parameter in self.lm.named_parameters():
            if parameter.requires_grad:
                yield name, parameter


class Policy(Body):
    """Wraps a causal LM. Its forward is the FSDP root: the body, and the head on the predictions only."""

    def __init__(self, lm: Any) -> None:
        super().__init__(lm)
        self.scale = mechanisms.logit_scale(lm.config)

    def forward(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(P,) logprobs at the recorded temperature and (P,) entropies of the microbatch's predictions."""
        head = self.lm.get_output_embeddings().weight
        temperatures_P = batch.temperatures_P if self.scale == 1 else batch.temperatures_P / self.scale
        return token_logprobs(
            self.sources(batch), head, batch.targets_P, temperatures_P, entropy_gradient=entropy_gradient
        )
