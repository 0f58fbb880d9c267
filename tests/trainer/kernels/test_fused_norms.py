"""Norms of transformers' models that PyTorch's fused kernel computes."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from agentrl.trainer.kernels import fused_norms


def norm_of(family: str, name: str, size: int) -> nn.Module:
    norm: nn.Module = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(size)
    nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "Qwen2RMSNorm"),
        ("llama", "LlamaRMSNorm"),
        ("gpt_oss", "GptOssRMSNorm"),
        ("deepseek_v3", "DeepseekV3RMSNorm"),
    ],
)
def test_a_plain_norm_keeps_its_outputs_and_gradients(family: str, name: str) -> None:
    norm = norm_of(family, name, 16)
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def computed() -> list[torch.Tensor]:
        at = x.float().requires_grad_()
        norm.weight.grad = None
        out = norm(at)
        (out * torch.arange(16.0)).sum().backward()
        assert at.grad is not None
        return [out.detach(), at.grad, norm.weight.grad.clone()]

    before, names = computed(), list(norm.state_dict())
    fused_norms.adopt(norm)
    assert type(norm).__name__ == f"Fused{name}"
    assert list(norm.state_dict()) == names
    for ours, theirs in zip(computed(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once() -> None:
    norm = norm_of("qwen2", "Qwen2RMSNorm", 64).to(torch.bfloat16)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), norm.variance_epsilon)
    fused_norms.adopt(norm)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma3", "Gemma3RMSNorm"), ("qwen3_next", "Qwen3NextRMSNorm"), ("qwen3_next", "Qwen3NextRMSNormGated")],
)
def test_other_norms_are_left_as_they_are(family: str, name: str) -> None:
    norm = norm_of(family, name, 8)
    fused_norms.adopt(norm)
    assert type(norm).__name__ == name


def test_a_model_on_the_meta_device_is_adopted() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=32, head_dim=8))
    fused_norms.adopt(lm)
    kinds = [type(module).__name__ for module in lm.modules() if "RMSNorm" in type(module).__name__]
    assert kinds == ["FusedQwen3RMSNorm"] * (2 * 4 + 1)
