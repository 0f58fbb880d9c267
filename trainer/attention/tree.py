"""The forest of a microbatch, as attention sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.domain.schemas import Int32
from agentrl.trainer.attention.blocks import BLOCK, blocks
from agentrl.trainer.attention.pieces import Chain, Piece, chains, pieces, windowed


class Tree:
    """N tokens in depth-first order: token i attends to token j iff j <= i < ends[j].

    This is not a dataclass because FSDP with mixed precision would give each block its own copy of a dataclass.
    """

    __slots__ = (
        "_block_masks",
        "_cut",
        "_masks",
        "_starts",
        "chains",
        "depth",
        "device",
        "ends_N",
        "marker",
        "positions_N",
    )

    def __init__(self, ends_N: Int32, positions_N: Int32, device: torch.device | None = None) -> None:
        self.ends_N = ends_N  # one past each token's last descendant
        self.positions_N = positions_N  # each token's position in its sequence
        self.depth = int(positions_N.max()) + 1  # tokens of the longest sequence
        self.chains: list[Chain] = chains(ends_N)
        self.device = device or torch.device("cpu")
        self.marker = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        """The mask for transformers, which passes one of four dimensions on unchanged. (FSDP would cast a float.)"""
        self._cut: dict[int | None, list[Piece]] = {}
        self._masks: dict[tuple[Piece, int | None, torch.dtype], Tensor] = {}
        self._block_masks: dict[int | None, Any] = {}
        self._starts: Tensor | None = None

    def to(self, device: torch.device) -> Tree:
        """The same forest for tensors on `device`."""
        return self if device == self.device else Tree(self.ends_N, self.positions_N, device)

    @property
    def windows(self) -> set[int]:
        """The sliding windows with which the model has attended."""
        return {window for window in self._cut if window is not None}

    def pieces(self, window: int | None) -> list[Piece]:
        """The attention in pieces; with `window`, a token sees its sequence's last `window` tokens only."""
        if window not in self._cut:
            self._cut[window] = pieces(self.chains) if window is None else self._windowed(window)
        return self._cut[window]

    def _windowed(self, window: int) -> list[Piece]:
        whole = self.pieces(None)
        return whole if window >= self.depth else windowed(whole, self.positions_N, window)

    def mask(self, piece: Piece, window: int | None, dtype: torch.dtype) -> Tensor:
        """(Q, K) additive mask of a piece, made once."""
        key = piece, window, dtype
        if key not in self._masks:
            self._masks[key] = self._mask(piece, window, dtype)
        return self._masks[key]

    def blocks(self, window: int | None) -> Any:
        """The attention as a BlockMask of FlexAttention, made once."""
        if window not in self._block_masks:
            self._block_masks[window] = self._block_mask(window)
        return self._block_masks[window]

    def sequence_starts(self) -> tuple[Tensor, int]:
        """(R + 1,) int32, where each root's tokens start, and N; and the tokens of the longest sequence."""
        if self._starts is None:
            starts = [chain.start for chain in self.chains if chain.parent < 0]
            self._starts = self._sent(np.array([*starts, len(self.ends_N)], np.int32))
        return self._starts, self.depth

    def sees(self, piece: Piece, window: int | None) -> NDArray[np.bool_]:
        """(Q, K) which of a piece's queries see which of its keys."""
        queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
        i_Q1, j_1K = np.arange(piece.query, piece.query_stop)[:, None], np.arange(piece.key, piece.key_stop)[None, :]
        sees_QK = (j_1K <= i_Q1) & (i_Q1 < self.ends_N[None, keys])
        if window is not None:
            sees_QK &= self.positions_N[queries, None] - self.positions_N[None, keys] < window
        return sees_QK

    def _mask(self, piece: Piece, window: int | None, dtype: torch.dtype) -> Tensor:
        sees_QK = torch.from_numpy(self.sees(piece, window))
        mask_QK = torch.zeros(sees_QK.shape, dtype=dtype).masked_fill_(~sees_QK, torch.finfo(dtype).min)
        return mask_QK.to(self.device, non_blocking=True)

    def _sent(self, array: NDArray[np.int32]) -> Tensor:
        """An array on the device; on a GPU the copy is not waited for."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _block_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        tokens = len(self.ends_N)
        found = blocks(self.pieces(window), lambda piece: self.sees(piece, window), tokens)
        ends_N, positions_N = (self._sent(x) for x in (self.ends_N, self.positions_N))

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (query < ends_N[key])
            return seen if window is None else seen & (positions_N[query] - positions_N[key] < window)

        def listed(counts_R: Int32, columns_RR: Int32) -> tuple[Tensor, Tensor]:
            counts, columns = (self._sent(x)[None, None] for x in (counts_R, columns_RR))
            return counts, columns

        partial, whole = listed(found.partial_R, found.partial_RR), listed(found.whole_R, found.whole_RR)
        return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens))
