"""The platform class that SGLang loads on a CPU. Imported by SGLang only; imports torch."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from agentrl.engine.sglang.cpu.fast_layers import RotaryAngles, fast_norm, fast_rotary
from agentrl.engine.sglang.cpu.murmur import murmur_hash32
from agentrl.engine.sglang.cpu.packed_linears import PackedLinears

ATTENTION = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """A CPU without AMX: torch kernels, no graph capture, no Triton, no pinned memory.

    It is out-of-tree because SGLang's own CPU platform requires wheels for CUDA and AMX.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """False: there is no device to pin memory for."""
        return False

    def init_backend(self) -> None:
        """Replace SGLang's platform-independent uses of GPU memory and kernels.

        LoRA modules get unpinned memory. Seeded sampling uses a torch hash and the standard matrix products instead of
        Triton. Host buffers, among them the one of routed experts, are not registered with CUDA.
        """
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler
        from sglang.srt.lora import layers
        from sglang.srt.lora.backend import torch_backend
        from sglang.srt.mem_cache.pool_host import common

        common.ALLOC_MEMORY_FUNCS["cpu"] = _unregistered
        layers.torch = torch_backend.torch = _Unpinned("torch")
        torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment, method-assign]
        batch_invariant_ops.enable_batch_invariant_mode = _no_kernels
        sampler.murmur_hash32 = murmur_hash32
        _use_fast_layers()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Allow per-request seeds (`--enable-deterministic-inference`) with this attention backend and
        SGLang's cache.
        """
        from sglang.srt.arg_groups import choices

        choices.add_deterministic_attention_backend_choices([ATTENTION])
        choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION])

    def get_default_attention_backend(self) -> str:
        """Use torch's scaled_dot_product_attention."""
        return ATTENTION

    def get_dispatch_key_name(self) -> str:
        """Let fused operators run their `forward_native`."""
        return "native"


def _use_fast_layers() -> None:
    """Replace SGLang's attention, norms, rotary embeddings and products, which compute the same with less work."""
    from sglang.srt.layers.attention import torch_native_backend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    from agentrl.engine.sglang.cpu.attention_backend import BatchedAttention

    linears = PackedLinears()
    for kind, after in (
        (UnquantizedLinearMethod, linears.after_loading),
        (UnquantizedEmbeddingMethod, linears.after_loading_head),
    ):
        kind.process_weights_after_loading = after(kind.process_weights_after_loading)
        kind.restore_weights_before_loading = linears.before_loading(kind.restore_weights_before_loading)
    UnquantizedLinearMethod.apply = linears.apply(UnquantizedLinearMethod.apply)
    LogitsProcessor._compute_lm_head = linears.head(LogitsProcessor._compute_lm_head)
    angles = RotaryAngles()
    torch_native_backend.TorchNativeAttnBackend = partial(BatchedAttention, angles=angles)
    RMSNorm.forward_native = fast_norm(RMSNorm.forward_native)
    RotaryEmbedding.forward_native = fast_rotary(RotaryEmbedding.forward_native, angles)


def _no_kernels(enable_bmm: bool = True) -> None:
    """Disable SGLang's batch-invariant kernels, which need a GPU."""


def _unregistered(dims: tuple[int, ...], *, dtype: torch.dtype, device: str = "cpu", **_: Any) -> torch.Tensor:
    return torch.zeros(dims, dtype=dtype, device=device)


def _as_it_is(tensor: Any, device: Any = None) -> Any:
    return tensor


class _Unpinned(ModuleType):
    """A torch module whose tensors are allocated in unpinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*args, **options)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*args, **options)
