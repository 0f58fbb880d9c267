"""The policy: a causal language model of transformers that computes logprobs of given tokens.

A `Body` is the part that all models of the trainer share: the decoder blocks, and how they read a microbatch.

    packed      forests of prefix trees through our attention: shared prefixes are computed once
    unpacked    each sequence by itself through transformers' own forward, for models that mix tokens in other ways

Loading a model decides which of the two it uses (packing_probe.py). H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from agentrl.trainer.attention import tree_attention
from agentrl.trainer.experts.node_routes import NodeRoutes
from agentrl.trainer.experts.routing_replay import Routing
from agentrl.trainer.masked_outputs import MaskedOutputs, Places
from agentrl.trainer.metrics.flops import PassCounts
from agentrl.trainer.models import mechanisms
from agentrl.trainer.models.head import token_logprobs
from agentrl.trainer.models.teacher import AnyLesson, Lesson, divergence_from
from agentrl.trainer.models.tensor_naming import Names
from agentrl.trainer.packing import UNPACKED, Microbatch
from agentrl.trainer.parallel.context_parallel import Compute, Share

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
    context: DeviceMesh | None = None
    """The ranks that divide the tokens of a microbatch among them, this one included."""
    attention: str = tree_attention.SPLIT
    """transformers' name for the attention of packed sequences."""

    routing: Routing | None = None
    """The routers of a mixture-of-experts model."""

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
        self.lm.set_attn_implementation(self._own_attention if unpacked else self.attention)

    def budget(self, tokens: int) -> int:
        """The budget for packing batches of this model when a rank may have `tokens` tokens of a microbatch."""
        return UNPACKED if self.unpacked else tokens * (self.context.size() if self.context else 1)

    def share(self, batch: Microbatch) -> Share | None:
        """The tokens of a microbatch that this rank has; None without context ranks."""
        return Share(self.context, len(batch.input_ids_N)) if self.context else None

    def within(self, compute: Callable[[], T]) -> T:
        """Call `compute` as a forward pass of this FSDP root, which gathers the weights of the blocks that run."""
        return compute()

    def hidden(self, batch: Microbatch) -> Tensor:
        """(N, H) the last hidden states of the microbatch's tokens, or of this rank's share of them."""
        assert bool(batch.lengths) == bool(self.unpacked), "a batch is cut by its model's budget"
        if batch.lengths:
            return torch.cat(list(self._one_by_one(batch)))
        share, routes = self.share(batch), batch.routes
        if routes is not None and share is not None:
            routes = routes.part(share.take)
        with self._replaying(routes):
            return self.packed(batch, share)

    def _one_by_one(self, batch: Microbatch) -> Iterator[Tensor]:
        """The last hidden states of each sequence."""
        parts = torch.split(batch.input_ids_N, list(batch.lengths))
        routes = batch.routes.split(batch.lengths) if batch.routes is not None else [None] * len(parts)
        for ids_T, of_T in zip(parts, routes, strict=True):
            with self._replaying(of_T):
                yield self.alone(ids_T)

    def _replaying(self, routes: NodeRoutes | None) -> AbstractContextManager[None]:
        return nullcontext() if self.routing is None else self.routing.replaying(routes)

    def packed(self, batch: Microbatch, share: Share | None = None) -> Tensor:
        """(N, H) the last hidden states of the tokens of a forest; with a `share`, (n, H) those of the share."""
        ids, positions = batch.input_ids_N, batch.positions_N
        hidden: Tensor = self.blocks(
            input_ids=(share.take(ids) if share else ids)[None],
            position_ids=(share.take(positions) if share else positions)[None],
            attention_mask=batch.tree.marker,
            use_cache=False,
            tree=batch.tree,
            share=share,
        ).last_hidden_state[0]
        return hidden

    def alone(self, ids_T: Tensor) -> Tensor:
        """(T, H) the last hidden states of one sequence, by transformers' own forward."""
        hidden_TH: Tensor = self.blocks(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        return hidden_TH

    def predicted(
        self, batch: Microbatch, hidden: Tensor, sources_P: Tensor, sources: Places, compute: Compute
    ) -> tuple[Tensor, ...]:
        """(P,) each: what `compute` makes of the hidden states that predict. `hidden` is that of this rank's tokens;
        `sources` are `sources_P` on the host.
        """
        if (share := self.share(batch)) is not None:
            return share.predictions(hidden, sources, compute)
        return compute(hidden[sources_P], torch.arange(len(sources_P), device=sources_P.device))

    def scalars(self, batch: Microbatch, head: nn.Linear) -> Tensor:
        """(P,) float32, the output of a `head` of one output at the hidden states that predict."""

        def compute(hidden_PH: Tensor, _: Tensor) -> tuple[Tensor]:
            output_P = hidden_PH.float() @ head.weight[0].float()
            return (output_P if head.bias is None else output_P + head.bias.float(),)

        return self.predicted(batch, self.hidden(batch), batch.sources_P, batch.sources, compute)[0]

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
        self,
        batch: Microbatch,
        entropy_gradient: bool = False,
        masked: MaskedOutputs | None = None,
        lesson: AnyLesson | None = None,
    ) -> tuple[Tensor, ...]:
        """(P,) logprobs at the recorded temperature and (P,) entropies of the microbatch's predictions; with `masked`
        (P + E,): those that only its tokens need follow, without a gradient. With a `lesson` also the divergence from
        its distributions, (P,), or as many as it has.
        """
        self.count(batch, len(batch.sources_P) + (len(masked.sources_E) if masked else 0))
        hidden = self.hidden(batch)
        of_batch = (batch.sources_P, batch.sources, batch.targets_P, batch.temperatures_P)
        logprobs_P, entropy_P = self._logprobs(batch, hidden, *of_batch, entropy_gradient=entropy_gradient)
        divergence = []
        if lesson is not None:
            head, rows = self.lm.get_output_embeddings().weight, lesson.own_Q
            hidden_PH, temperatures_P = hidden[batch.sources_P], batch.temperatures_P / self.scale
            if rows is not None:
                hidden_PH, temperatures_P = hidden_PH[rows], temperatures_P[rows]
            heat_P = temperatures_P if lesson.heat_P is None else lesson.heat_P / self.scale
            divergence = [divergence_from(lesson, hidden_PH, head, heat_P)]
        if masked is None or not len(masked.sources_E):
            return logprobs_P, entropy_P, *divergence
        with torch.no_grad():
            of_masked = (masked.sources_E, masked.sources, masked.targets_E, masked.temperatures_E)
            logprobs_E, entropy_E = self._logprobs(batch, hidden, *of_masked)
        return torch.cat([logprobs_P, logprobs_E]), torch.cat([entropy_P, entropy_E]), *divergence

    @torch.no_grad()
    def lesson(self, batch: Microbatch, divergence: str, top_k: int | None) -> Lesson:
        """This model's distributions at the microbatch's predictions, for a policy that learns from it: after what it
        reads (`reading`), where that is not the microbatch. The head stays gathered until `reshard`.
        """
        reading = batch.reading
        batch = batch if reading is None else reading.batch

        def compute() -> Lesson:
            self.count(batch, len(batch.sources_P))
            hidden_PH = self.hidden(batch)[batch.sources_P]
            head = self.lm.get_output_embeddings().weight
            temperatures_P = batch.temperatures_P / self.scale
            if reading is None:
                return Lesson(hidden_PH, head, temperatures_P, divergence, top_k)
            theirs = reading.theirs_Q
            return Lesson(hidden_PH[theirs], head, temperatures_P[theirs], divergence, top_k, reading.own_Q)

        return self.within(compute)

    def _logprobs(
        self,
        batch: Microbatch,
        hidden: Tensor,
        sources_P: Tensor,
        sources: Places,
        targets_P: Tensor,
        temperatures_P: Tensor,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, ...]:
        """(P,) logprobs of the targets and (P,) entropies."""
        head = self.lm.get_output_embeddings().weight

        def compute(hidden_PH: Tensor, which_P: Tensor) -> tuple[Tensor, ...]:
            temperatures = temperatures_P[which_P] / self.scale
            return token_logprobs(hidden_PH, head, targets_P[which_P], temperatures, entropy_gradient=entropy_gradient)

        return self.predicted(batch, hidden, sources_P, sources, compute)
