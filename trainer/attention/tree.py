"""The forest of a microbatch, as attention sees it."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.domain.schemas import Int32
from agentrl.trainer.attention.pieces import Chain, Piece, chains, pieces, windowed


class Tree:
    """N tokens in depth-first order: token i attends to token j iff j <= i < ends[j].

    This is not a dataclass because FSDP with mixed precision would give each block its own copy of a dataclass.
    """

    __slots__ = ("_cut", "_masks", "chains", "depth", "device", "ends_N", "marker", "positions_N")

    def __init__(self, ends_N: Int32, positions_N: Int32, device: torch.device | None = None) -> None:
        self.ends_N = ends_N  # one past each token's last descendant
        self.positions_N = positions_N  # each token's position in its sequence
        self.depth = int(positions_N.max()) + 1  # tokens of the longest sequence
        self.chains: list[Chain] = chains(ends_N)
        self.device = device or torch.device("cpu")
        self.marker = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        """The mask for transformers, which passes one of four dimensions on unchanged. (FSDP would cast a float.)"""
        self._cut: dict[int | None, list[Piece]] = {None: pieces(self.chains)}
        self._masks: dict[tuple[Piece, int | None, torch.dtype], Tensor] = {}

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
            assert window is not None
            whole = self._cut[None]
            self._cut[window] = whole if window >= self.depth else windowed(whole, self.positions_N, window)
        return self._cut[window]

    def mask(self, piece: Piece, window: int | None, dtype: torch.dtype) -> Tensor:
        """(Q, K) additive mask of a piece, made once."""
        key = piece, window, dtype
        if key not in self._masks:
            self._masks[key] = self._mask(piece, window, dtype)
        return self._masks[key]

    def _mask(self, piece: Piece, window: int | None, dtype: torch.dtype) -> Tensor:
        queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
        i_Q = torch.arange(piece.query, piece.query_stop)[:, None]
        j_K = torch.arange(piece.key, piece.key_stop)[None, :]
        sees_QK = (j_K <= i_Q) & (i_Q < torch.from_numpy(self.ends_N[keys])[None, :])
        if window is not None:
            depth_Q, depth_K = (torch.from_numpy(self.positions_N[part]) for part in (queries, keys))
            sees_QK &= depth_Q[:, None] - depth_K[None, :] < window
        mask_QK = torch.zeros(sees_QK.shape, dtype=dtype).masked_fill_(~sees_QK, torch.finfo(dtype).min)
        return mask_QK.to(self.device, non_blocking=True)
