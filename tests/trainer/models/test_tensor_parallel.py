"""Ranks that split a block's products make the update of one rank; what cannot be split is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_tensor import CONFIGS, Found, measured, start, updates
from ranks import run_ranks
from safetensors.torch import load_file

from agentrl.configs.trainer_config import LoraConfig
from agentrl.errors import UserError
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.distributed import World
from agentrl.trainer.models import loading, lora, run_models
from agentrl.trainer.models.tensor_parallel import parallelize

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),  # norms of heads, inside attention
    "phi3": ("Phi3", {"hidden_size": 32, "eos_token_id": 1}),  # several projections in one matrix
}
CASES = (("qwen3", "full"), ("qwen3", "adapter"), ("phi3", "full"))


def save(family: str, folder: Path, **settings: Any) -> Path:
    """A model of two blocks with four heads; sizes that two divides and four does not."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 97,
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "initializer_range": 0.2,
        }
        | settings
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of model folders."""
    made = tmp_path_factory.mktemp("models")
    for name, (family, settings) in MODELS.items():
        save(family, made / name, **settings)
    return made


@pytest.fixture(scope="module")
def alone(root: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> dict[tuple[str, str], Found]:
    """What one rank computes."""
    out = tmp_path_factory.mktemp("alone")
    return {(name, kind): measured(root / name, kind, out / name, world) for name, kind in CASES}


@pytest.mark.parametrize(
    ("ranks", "replicas", "cases"),
    [(2, 1, CASES), *(pytest.param(4, replicas, CASES[:1], marks=pytest.mark.long) for replicas in (1, 2))],
)
def test_two_tensor_ranks_compute_the_same_update_as_one(
    root: Path, alone: dict[tuple[str, str], Found], world: World, tmp_path: Path, ranks: int, replicas: int, cases: Any
) -> None:
    run_ranks("rank_tensor.py", ranks, tmp_path, replicas, 2, *(f"{root / name}:{kind}" for name, kind in cases))
    for name, kind in cases:
        found = load_file(tmp_path / name / f"{kind}.safetensors")
        assert_same(found, alone[name, kind])
        if ranks == 2:
            goes_on_alone(root / name, kind, tmp_path / name, found, world)


def goes_on_alone(folder: Path, kind: str, checkpoints: Path, expected: Found, world: World) -> None:
    """One rank makes the second step from the checkpoint that several made of the first."""
    made, optimizer = start(folder, CONFIGS[kind], world)
    saved = checkpoint_folders.read(checkpoints / f"step-000001-{kind}")
    run_models.restore(saved, made, optimizer, CONFIGS[kind], world)
    found = {f"2/{name}": tensor for name, tensor in updates(made, optimizer, CONFIGS[kind], 2, world).items()}
    assert_same(found, {name: tensor for name, tensor in expected.items() if name.startswith("2/")})


def assert_same(found: Found, expected: Found) -> None:
    """To 1e-5 of each number's and each tensor's size; of nothing (a bias of keys), nothing."""
    assert found.keys() == expected.keys()
    whole = {part: norm(expected, part) for part in {name.rpartition("/")[0] for name in expected}}
    for name, tensor in expected.items():
        gap = (found[name].double() - tensor.double()).norm().item()
        size = max(tensor.double().norm().item(), 1e-3 * whole[name.rpartition("/")[0]])
        assert gap <= 1e-5 * size, (name, gap, size)


def norm(tensors: Found, prefix: str) -> float:
    return float(sum(t.double().square().sum() for name, t in tensors.items() if name.startswith(prefix)) ** 0.5)


@pytest.mark.parametrize(
    ("family", "ranks", "says"),
    [
        ("Llama", 4, "resources.trainer.tensor 4 does not divide the model's num_key_value_heads 2; 2 would"),
        ("Llama", 3, "resources.trainer.tensor 3 does not divide the model's num_attention_heads 4; 2 would"),
        ("GPT2", 2, "transformers has no tensor parallel plan for GPT2LMHeadModel; it must be 1"),
        ("Mixtral", 2, r"the plan of MixtralForCausalLM has layers\.0\.mlp\.experts as 'moe_tp_experts', which"),
    ],
)
def test_a_model_that_cannot_be_split_is_named(tmp_path: Path, family: str, ranks: int, says: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lm = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=says):
        parallelize(lm, SimpleNamespace(size=lambda: ranks))  # type: ignore[arg-type]


def test_both_nearest_valid_sizes_are_named(tmp_path: Path) -> None:
    lm, _ = loading.build(
        save("Llama", tmp_path, num_attention_heads=12, num_key_value_heads=12, intermediate_size=48, hidden_size=48)
    )
    lora.attach(lm, LoraConfig(rank=2))
    with pytest.raises(UserError, match="5 does not divide the model's num_attention_heads 12; 4 or 6 would"):
        parallelize(lm, SimpleNamespace(size=lambda: 5))  # type: ignore[arg-type]
