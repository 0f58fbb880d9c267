"""The arithmetic of a model, counted by hand and by torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.models import tiny
from agentrl.trainer.metrics import flops
from agentrl.trainer.metrics.flops import PassCounts, Work, matmul_flops, peak_flops, update_flops
from agentrl.trainer.metrics.model_shape import shape_of

MODEL = {
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "vocab_size": 10,
}
BLOCK = 2 * (4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 8)
HEAD = 2 * 4 * 10
PAIR = 2 * (4 + 4)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 40, "head_dim": 8},
    "qwen3_moe": {**ROUTED, "num_experts": 4, "mlp_only_layers": [1]},
    "glm4_moe": {**ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **ROUTED,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "head_dim": None,
    },
}
"""Small models of each family, as settings beside those of SMALL."""


def test_flops_count_the_weight_products() -> None:
    assert matmul_flops(MODEL, tokens=1, predictions=0) == 3 * BLOCK
    assert matmul_flops(MODEL, tokens=0, predictions=1) == HEAD


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2 * (3 * 3 * BLOCK + 2 * HEAD) + 3 * PAIR * (15 + 2 * 6)),
        ({"train_layers": 1}, 2 * 3 * BLOCK + 2 * HEAD + PAIR * (3 * 15 + 2 * 6)),
        ({"lora": {"rank": 4}}, 3 * 3 * BLOCK + 2 * HEAD + 3 * PAIR * (15 + 2 * 6)),
    ],
)
def test_a_backward_pass_costs_only_trained_weights(settings: dict[str, object], expected: float) -> None:
    passes = PassCounts(Work(5, 4, 15), Work(3, 2, 6))
    assert update_flops(MODEL, passes, TrainerConfig(**settings)) == 5 * 3 * BLOCK + 4 * HEAD + expected


@pytest.mark.parametrize(("settings", "trains"), [({}, True), ({"lora": {"rank": 4}}, False)])
def test_update_flops_equal_torchs_count(settings: dict[str, object], trains: bool) -> None:
    config = tiny.model_config()
    model = transformers.Qwen2ForCausalLM(config).requires_grad_(trains)
    embedded = torch.randn(1, 7, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]
    assert products == update_flops(config.to_dict(), PassCounts(Work(7, 7), Work(7, 7)), TrainerConfig(**settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_count_equals_torchs(family: str) -> None:
    sizes = SMALL | FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **{key: size for key, size in sizes.items() if size is not None})
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(7)[None], use_cache=False)
    with FlopCounterMode(display=False) as of_angles:
        model.model.rotary_emb(torch.zeros(1, 7, 4), torch.arange(7)[None])
    counts = counter.get_flop_counts()["Global"]
    shape = shape_of(config.to_dict())
    assert shape is not None
    products = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products == matmul_flops(config.to_dict(), 7, 7)
    pairs = counts[torch.ops.aten.bmm] - of_angles.get_total_flops()
    assert pairs == 2 * 7 * 7 * shape.pair * config.num_hidden_layers
    matrices = [p.numel() for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith("bias")]
    assert shape.parameters == sum(matrices)


def test_models_that_are_not_known_are_not_counted() -> None:
    assert shape_of(MODEL) is not None
    assert shape_of(MODEL | {"num_experts": 8}) is None
    assert shape_of(MODEL | {"model_type": "phi"}) is None
    assert shape_of(MODEL | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}) is None
    assert shape_of({"hidden_size": 4}) is None


def test_blocks_with_a_window_add_no_pairs() -> None:
    passes = PassCounts(Work(0, 0, 10), Work())
    windowed = MODEL | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert update_flops(windowed, passes, TrainerConfig()) == 10 * PAIR
    assert update_flops(MODEL | {"sliding_window": 8}, passes, TrainerConfig()) == 0
    assert update_flops(MODEL | {"sliding_window": 8, "use_sliding_window": False}, passes, TrainerConfig()) > 0


def test_the_peak_is_that_of_the_device_that_the_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu")) is None
    monkeypatch.setattr(flops, "_power_limit", {"sxm": 700.0, "pcie": 350.0}.get)
    for name, uuid, peak in (
        ("NVIDIA H200", "", 989e12),
        ("NVIDIA H100", "sxm", 989e12),
        ("NVIDIA H100", "pcie", 756e12),
        ("Somebody's GPU", "", None),
    ):
        memory = 150 * 10**9 if "H200" in name else 85 * 10**9
        about = SimpleNamespace(name=name, total_memory=memory, uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, about=about: about)
        assert peak_flops(torch.device("cuda")) == peak
