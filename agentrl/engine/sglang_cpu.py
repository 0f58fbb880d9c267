"""The platform class that SGLang loads on a plain CPU. Imported by SGLang only: it pulls torch in."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from agentrl.engine.murmur import murmur_hash32

ATTENTION = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """A CPU without AMX: pure torch kernels, no graph capture, no Triton, no pinned memory.

    It calls itself out-of-tree because SGLang's own CPU platform imports wheels that exist for CUDA and AMX only.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to pin host memory for."""
        return False

    def init_backend(self) -> None:
        """Replace what SGLang does with memory or kernels of a GPU whatever the platform says.

        Its LoRA modules pin memory: here they get it unpinned. Sampling with seeds has Triton kernels: here it hashes
        in torch, and uses the ordinary matrix products.
        """
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler
        from sglang.srt.lora import layers
        from sglang.srt.lora.backend import torch_backend

        layers.torch = torch_backend.torch = _Unpinned("torch")
        torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment, method-assign]
        batch_invariant_ops.enable_batch_invariant_mode = _no_kernels
        sampler.murmur_hash32 = murmur_hash32

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Per-request seeds (`--enable-deterministic-inference`) work with our attention, and with SGLang's cache."""
        from sglang.srt.arg_groups import choices

        choices.add_deterministic_attention_backend_choices([ATTENTION])
        choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION])

    def get_default_attention_backend(self) -> str:
        """Attention through torch's scaled_dot_product_attention."""
        return ATTENTION

    def get_dispatch_key_name(self) -> str:
        """Fused operators run their `forward_native`."""
        return "native"


def _no_kernels(enable_bmm: bool = True) -> None:
    """SGLang's batch-invariant kernels are for GPUs."""


def _as_it_is(tensor: Any, device: Any = None) -> Any:
    return tensor


class _Unpinned(ModuleType):
    """torch, whose tensors are made in plain memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*args, **options)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*args, **options)
