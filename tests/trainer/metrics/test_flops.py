"""The arithmetic of a model, counted by hand and by torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.models import tiny
from agentrl.trainer.metrics.flops import Work, is_dense, matmul_flops, peak_flops, update_flops

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


def test_flops_count_the_weight_products() -> None:
    assert matmul_flops(MODEL, tokens=1, predictions=0) == 3 * BLOCK
    assert matmul_flops(MODEL, tokens=0, predictions=1) == HEAD


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 5 * 3 * BLOCK + 4 * HEAD + 2 * (3 * 3 * BLOCK + 2 * HEAD)),
        ({"train_layers": 1}, 5 * 3 * BLOCK + 4 * HEAD + 2 * 3 * BLOCK + 2 * HEAD),
        ({"lora": {"rank": 4}}, 5 * 3 * BLOCK + 4 * HEAD + 3 * 3 * BLOCK + 2 * HEAD),
    ],
)
def test_a_backward_pass_costs_only_trained_weights(settings: dict[str, object], expected: float) -> None:
    work = Work(forward=(5, 4), backward=(3, 2))
    assert update_flops(MODEL, work, TrainerConfig(**settings)) == expected


@pytest.mark.parametrize(("settings", "trains"), [({}, True), ({"lora": {"rank": 4}}, False)])
def test_update_flops_equal_torchs_count(settings: dict[str, object], trains: bool) -> None:
    from transformers import Qwen2ForCausalLM

    config = tiny.model_config()
    model = Qwen2ForCausalLM(config).requires_grad_(trains)
    embedded = torch.randn(1, 7, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]
    assert products == update_flops(config.to_dict(), Work(forward=(7, 7), backward=(7, 7)), TrainerConfig(**settings))


def test_models_with_experts_are_not_counted() -> None:
    assert is_dense(MODEL)
    assert not is_dense(MODEL | {"num_experts": 8})
    assert not is_dense({"hidden_size": 4})


def test_the_peak_is_known_of_some_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu")) is None
    for name, peak in (("NVIDIA H200", 989e12), ("Somebody's GPU", None)):
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_name=lambda _, name=name: name))
        assert peak_flops(torch.device("cuda")) == peak
