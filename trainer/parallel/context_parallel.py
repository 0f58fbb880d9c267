"""Context parallelism (Ulysses, arXiv 2309.14509): ranks with the same microbatch divide its tokens among them.

    embedding, norms, products   ─► a rank has n of the N tokens, all heads
    all-to-all                   ─► all N tokens, some of the heads
    attention                    ─► as on one rank: it sees the whole tree
    all-to-all                   ─► n tokens, all heads
    head                         ─► a rank computes the predictions of its own tokens; all ranks get all of them

Every rank of the group computes the same loss from all predictions, and its backward pass goes on with its own ones.
The gradient of a parameter is therefore a sum over the ranks.

N: tokens of the microbatch, W: ranks, n: tokens of a rank, h: heads, d: head size, P: predictions, p: those of a rank,
H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from agentrl.errors import UserError
from agentrl.trainer.parallel.head_split import HeadSplit

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(1, h, N, d) queries, keys, values, and (h,) sinks or None → (1, h, N, d)."""
Compute = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(p, H) hidden states that predict, and (p,) which of the P predictions they are → (p,) float32 tensors."""


class Share:
    """One rank's share of a microbatch: `length` consecutive tokens from `first` on. The last ranks' shares may end in
    padding.

    This is not a dataclass because FSDP with mixed precision would give each block its own copy of a dataclass.
    """

    __slots__ = ("first", "group", "length", "rank", "ranks", "tokens")

    def __init__(self, mesh: DeviceMesh, tokens: int) -> None:
        self.group = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.tokens = tokens  # N
        self.length = -(-tokens // self.ranks)  # n
        self.first = self.rank * self.length

    @property
    def held(self) -> int:
        """How many of the n tokens are no padding."""
        return min(self.length, max(0, self.tokens - self.first))

    def take(self, x_N: Tensor) -> Tensor:
        """(n, …) this rank's rows of (N, …), and zeros for padding. Without a gradient."""
        own = x_N.new_zeros(self.length, *x_N.shape[1:])
        own[: self.held] = x_N[self.first : self.first + self.held]
        return own

    def attend(
        self, attend: Attend, query_1hnd: Tensor, key_1hnd: Tensor, value_1hnd: Tensor, sinks_h: Tensor | None
    ) -> Tensor:
        """(1, n, h, d) what `attend` makes of all N tokens, at this rank's tokens. Collective."""
        heads = query_1hnd.shape[1]
        split = HeadSplit.of(heads, key_1hnd.shape[1], self.ranks)
        query_1hnd = _padded(query_1hnd, split.queries)
        key_1hnd, value_1hnd = (
            _padded(x_1hnd.repeat_interleave(split.copies, 1), split.keys) for x_1hnd in (key_1hnd, value_1hnd)
        )
        if sinks_h is not None:
            sinks_h = pad(sinks_h, (0, split.queries - heads)).chunk(self.ranks)[self.rank]
        query_1hNd, key_1hNd, value_1hNd = self._to_heads([query_1hnd, key_1hnd, value_1hnd])
        out_1hNd = attend(query_1hNd, key_1hNd, value_1hNd, sinks_h)
        return self._to_tokens(out_1hNd.transpose(1, 2))[:, :, :heads]

    def _to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """(1, h, n, d) → (1, h/W, N, d), in one exchange."""
        sizes = [x.numel() // self.ranks for x in parts]
        sent = torch.cat([x.reshape(self.ranks, -1) for x in parts], 1)  # row w: the heads of rank w
        got = torch.split(self._exchanged(sent), sizes, 1)  # row w: the tokens of rank w
        found = []
        for x, part in zip(parts, got, strict=True):
            _, heads, length, size = x.shape
            x_Whnd = part.view(self.ranks, heads // self.ranks, length, size)
            x_hNd = x_Whnd.transpose(0, 1).reshape(heads // self.ranks, -1, size)
            found.append(x_hNd[None, :, : self.tokens])
        return found

    def _to_tokens(self, x_1Nhd: Tensor) -> Tensor:
        """(1, N, h/W, d) → (1, n, h, d)."""
        _, tokens, heads, size = x_1Nhd.shape
        x_Nhd = pad(x_1Nhd[0], (0, 0, 0, 0, 0, self.ranks * self.length - tokens))
        got = self._exchanged(x_Nhd.reshape(self.ranks, -1)).view(self.ranks, self.length, heads, size)
        return got.transpose(0, 1).reshape(1, self.length, self.ranks * heads, size)

    def _exchanged(self, x_WX: Tensor) -> Tensor:
        """Row w goes to rank w; returns the rows that all ranks have for this one. Has a gradient."""
        got_WX: Tensor = all_to_all_single(x_WX.contiguous(), None, None, self.group)
        return got_WX

    def predictions(self, hidden_nH: Tensor, sources: npt.NDArray[np.int64], compute: Compute) -> tuple[Tensor, ...]:
        """(P,) each: what `compute` makes of the predictions, each on the rank that holds its source. Collective.

        `sources` (P,) are on the host, so that no rank waits for its device. A rank without predictions computes one
        that is not used: the head's weight must get a gradient everywhere.
        """
        holders = sources // self.length
        order = holders.argsort(kind="stable")
        counts = np.bincount(holders, minlength=self.ranks).tolist()
        first = sum(counts[: self.rank])
        own = order[first : first + counts[self.rank]] if counts[self.rank] else order[:1]
        rows = (sources[own] - self.first).clip(0, self.length - 1)
        order_P, own_p, rows_p = (
            torch.from_numpy(x).to(hidden_nH.device, non_blocking=True) for x in (order, own, rows)
        )
        found: tuple[Tensor, ...] = _Gathered.apply(  # type: ignore[no-untyped-call]
            self, order_P, counts, *compute(hidden_nH[rows_p], own_p)
        )
        return found


class _Gathered(torch.autograd.Function):
    """Joins the predictions of all ranks. Backward: the gradients of this rank's own, since all ranks have all."""

    @staticmethod
    def forward(ctx: Any, share: Share, order_P: Tensor, counts: list[int], *parts: Tensor) -> tuple[Tensor, ...]:
        own, most = counts[share.rank], max(counts)
        padded = parts[0].new_zeros(len(parts), most)
        padded[:, :own] = torch.stack([part_p[:own] for part_p in parts])
        by_rank = [torch.empty_like(padded) for _ in range(share.ranks)]
        dist.all_gather(by_rank, padded, group=share.group)
        joined = torch.cat([theirs[:, :count] for theirs, count in zip(by_rank, counts, strict=True)], 1)
        found = torch.empty_like(joined)
        found[:, order_P] = joined
        first = sum(counts[: share.rank])
        ctx.save_for_backward(order_P[first : first + own])
        outputs = tuple(row.clone() for row in found)  # outputs that share memory could not be marked apart
        ctx.mark_non_differentiable(*(o for o, part in zip(outputs, parts, strict=True) if not part.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (own_p,) = ctx.saved_tensors
        return None, None, None, *(grad_P[own_p] if len(own_p) else grad_P.new_zeros(1) for grad_P in grads)


def _padded(x_1hnd: Tensor, heads: int) -> Tensor:
    """With heads of zeros behind the others."""
    return pad(x_1hnd, (0, 0, 0, 0, 0, heads - x_1hnd.shape[1])) if heads > x_1hnd.shape[1] else x_1hnd


def check(config: Any, undivided: str, ranks: int, tensor: int) -> None:
    """Raise UserError when a model's sequences cannot be divided over so many ranks, or at all, for the reason in
    `undivided`.
    """
    heads = config.get_text_config().num_attention_heads // tensor
    if undivided:
        raise UserError(f"resources.trainer.context cannot divide this model's sequences: {undivided}; it must be 1")
    if ranks > heads:
        raise UserError(f"resources.trainer.context {ranks} is more than the {heads} heads to divide; {heads} would do")
