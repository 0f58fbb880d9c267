"""The policy: any causal language model of transformers, asked for logprobs only.

A `Body` is what other models of the trainer share with it: the blocks, and how they read a microbatch.

H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from agentrl.trainer.attention import Rows, tree_mask
from agentrl.trainer.head import token_logprobs
from agentrl.trainer.naming import Names
from agentrl.trainer.packing import Microbatch


class Body(nn.Module):
    """A model of transformers that reads packed rows."""

    names: Names
    """What the tensors of the folder that it was loaded from are in it."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def sources(self, batch: Microbatch) -> Tensor:
        """(P, H) the hidden states that the microbatch's predictions are made from."""
        mask_B1LL = tree_mask(batch.ends_BL, self.lm.get_input_embeddings().weight.dtype)
        hidden_NH: Tensor = self.lm.base_model(
            input_ids=batch.input_ids_N[None],
            position_ids=batch.positions_N[None],
            attention_mask=mask_B1LL,  # used as it is: four dimensions tell transformers to build none
            use_cache=False,
            rows=Rows(batch.nodes_BL, batch.homes_N, mask_B1LL, int(batch.positions_N.max()) + 1),
        ).last_hidden_state[0]
        return hidden_NH[batch.sources_P]

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by their Hugging Face name, in a fixed order."""
        for name, parameter in self.lm.named_parameters():
            if parameter.requires_grad:
                yield name, parameter


class Policy(Body):
    """Wraps a causal LM. Its forward is the FSDP root: the body on packed rows, the head on the predictions only."""

    def forward(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(P,) logprobs at the recorded temperature and (P,) entropies of the microbatch's predictions."""
        head = self.lm.get_output_embeddings().weight
        return token_logprobs(
            self.sources(batch), head, batch.targets_P, batch.temperatures_P, entropy_gradient=entropy_gradient
        )
