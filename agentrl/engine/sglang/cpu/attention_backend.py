"""SGLang's attention backend `torch_native`, with our attention inside. Imported by SGLang only; imports torch."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from agentrl.engine.sglang.cpu.batched_attention import (
    DecodeGroup,
    Extension,
    attend_last,
    attend_new,
    decode_groups,
    extensions,
)
from agentrl.engine.sglang.cpu.fast_layers import RotaryAngles


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang ships no types
    """Plans once for each forward pass what all its layers attend to.

    Attention to an encoder, attention in both directions, and caches with a window of their own are left to SGLang.
    """

    def __init__(self, model_runner: Any, *, angles: RotaryAngles) -> None:
        super().__init__(model_runner)
        self._angles = angles
        self._groups: list[DecodeGroup] | None = None  # of this forward pass; made by its first layer
        self._extensions: list[Extension] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begin a forward pass."""
        super().init_forward_metadata(forward_batch)
        self._groups = self._extensions = None
        self._angles.begin()

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if encoder_lens is not None or is_cross_attn or self.use_sliding_window_kv_pool or scaling is None:
            places = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
            options = (scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
            found: Tensor = super()._run_sdpa_forward_decode(*places, *options)
            return found
        if self._groups is None:
            self._groups = decode_groups(req_to_token, req_pool_indices, seq_lens.tolist())
        attend_last(query, output, k_cache, v_cache, self._groups, scale=scaling, window=sliding_window_size)
        return output

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        others = encoder_lens is not None or is_cross_attn or self.use_sliding_window_kv_pool
        if others or not causal or scaling is None:
            lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
            options = (scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
            found: Tensor = super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, *lengths, *options
            )
            return found
        if self._extensions is None:
            new = extend_seq_lens.tolist()
            self._extensions = extensions(req_to_token, req_pool_indices, extend_prefix_lens.tolist(), new)
        attend_new(query, output, k_cache, v_cache, self._extensions, scale=scaling, window=sliding_window_size)
        return output
