"""The policy: a causal language model of transformers that computes logprobs of given tokens.

A `Body` is the part that all models of the trainer share: the decoder blocks, and how they read a microbatch.

    packed      rows of prefix trees through our attention: shared prefixes are computed once
    unpacked    each sequence by itself through transformers' own forward, for models that mix tokens in other ways

Loading a model decides which of the two it uses (packing_probe.py). H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from agentrl.trainer.masked_outputs import MaskedOutputs
from agentrl.trainer.metrics.flops import PassCounts
from agentrl.trainer.models import attention, mechanisms
from agentrl.trainer.models.attention import Rows, tree_mask
from agentrl.trainer.models.head import token_logprobs
from agentrl.trainer.models.tensor_naming import Names
from agentrl.trainer.packing import UNPACKED, Microbatch

T = TypeVar("T")


def decoder(lm: Any) -> Any:
    """A causal LM without its head: embedding, blocks and final norm."""
    base = lm.base_model
    return lm.model if base is lm and hasattr(lm, "model") else base


class Body(nn.Module):
    """A model of transformers that reads microbatches. The base of policy, critic and reward model."""

    names: Names
    """Maps the tensors of the model folder to the model's tensors."""
    unpacked: str = ""
    """Why sequences are not packed; empty when they are."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.counted = PassCounts.none()
        self._own_attention = mechanisms.attention_of(lm)

    @property
    def blocks(self) -> Any:
        """The model without its head."""
        return decoder(self.lm)

    def read(self, unpacked: str = "", *, plainly: bool = False) -> None:
        """Read packed microbatches; or unpacked ones, for the reason in `unpacked`.

        `plainly` uses from now on the attention of the model's own file, which knows all of its arguments.
        """
        self.unpacked = unpacked
        self._own_attention = mechanisms.PLAIN if plainly else self._own_attention
        self.lm.set_attn_implementation(self._own_attention if unpacked else attention.NAME)

    def budget(self, tokens: int) -> int:
        """The budget for packing batches of this model when a microbatch may have `tokens` tokens."""
        return UNPACKED if self.unpacked else tokens

    def within(self, compute: Callable[[], T]) -> T:
        """Call `compute` as a forward pass of this FSDP root, which gathers the weights of the blocks that run."""
        return compute()

    def hidden(self, batch: Microbatch) -> Tensor:
        """(N, H) the last hidden states of the microbatch's tokens."""
        assert bool(batch.lengths) == bool(self.unpacked), "a batch is cut by its model's budget"
        if batch.lengths:
            return torch.cat([self.alone(ids_T) for ids_T in torch.split(batch.input_ids_N, list(batch.lengths))])
        return self.packed(batch, self.rows(batch))

    def rows(self, batch: Microbatch) -> Rows:
        """The attention rows of a packed microbatch."""
        mask_B1LL = tree_mask(batch.ends_BL, self.lm.get_input_embeddings().weight.dtype)
        return Rows(batch.nodes_BL, batch.homes_N, mask_B1LL, batch.positions_N, batch.depth)

    def packed(self, batch: Microbatch, rows: Rows) -> Tensor:
        """(N, H) the last hidden states, computed in attention rows."""
        hidden_NH: Tensor = self.blocks(
            input_ids=batch.input_ids_N[None],
            position_ids=batch.positions_N[None],
            attention_mask=rows.mask_B1LL,  # four dimensions: transformers uses the mask unchanged
            use_cache=False,
            rows=rows,
        ).last_hidden_state[0]
        return hidden_NH

    def alone(self, ids_T: Tensor) -> Tensor:
        """(T, H) the last hidden states of one sequence, by transformers' own forward."""
        hidden_TH: Tensor = self.blocks(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        return hidden_TH

    def sources(self, batch: Microbatch) -> Tensor:
        """(P, H) the hidden states that predict."""
        return self.hidden(batch)[batch.sources_P]

    def count(self, batch: Microbatch, predictions: int) -> None:
        """Count a forward pass; where gradients are recorded, a backward pass too."""
        self.counted.add(len(batch.input_ids_N), predictions, batch.pairs, trains=torch.is_grad_enabled())

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

    def forward(
        self, batch: Microbatch, entropy_gradient: bool = False, masked: MaskedOutputs | None = None
    ) -> tuple[Tensor, Tensor]:
        """(P,) logprobs at the recorded temperature and (P,) entropies of the microbatch's predictions; with `masked`
        (P + E,): those that only its tokens need follow, without a gradient.
        """
        head = self.lm.get_output_embeddings().weight
        self.count(batch, len(batch.sources_P) + (len(masked.sources_E) if masked else 0))
        hidden_NH = self.hidden(batch)
        logprobs_P, entropy_P = token_logprobs(
            hidden_NH[batch.sources_P],
            head,
            batch.targets_P,
            batch.temperatures_P / self.scale,
            entropy_gradient=entropy_gradient,
        )
        if masked is None or not len(masked.sources_E):
            return logprobs_P, entropy_P
        with torch.no_grad():
            logprobs_E, entropy_E = token_logprobs(
                hidden_NH[masked.sources_E], head, masked.targets_E, masked.temperatures_E / self.scale
            )
        return torch.cat([logprobs_P, logprobs_E]), torch.cat([entropy_P, entropy_E])
