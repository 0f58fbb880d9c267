"""The arithmetic of a model, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agentrl.configs.trainer_config import TrainerConfig
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


def test_flops_are_those_of_the_weights() -> None:
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
def test_a_backward_costs_what_is_trained(settings: dict[str, object], expected: float) -> None:
    work = Work(forward=(5, 4), backward=(3, 2))
    assert update_flops(MODEL, work, TrainerConfig(**settings)) == expected


def test_models_with_experts_are_not_counted() -> None:
    assert is_dense(MODEL)
    assert not is_dense(MODEL | {"num_experts": 8})
    assert not is_dense({"hidden_size": 4})


def test_the_peak_is_known_of_some_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu")) is None
    for name, peak in (("NVIDIA H200", 989e12), ("Somebody's GPU", None)):
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_name=lambda _, name=name: name))
        assert peak_flops(torch.device("cuda")) == peak
