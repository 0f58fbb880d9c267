"""A model that cannot be split over tensor ranks is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from layouts import save

from agentrl.configs.trainer_config import LoraConfig
from agentrl.errors import UserError
from agentrl.trainer.models import loading, lora
from agentrl.trainer.models.policy import decoder
from agentrl.trainer.parallel.tensor_parallel import parallelize


@pytest.mark.parametrize(
    ("family", "ranks", "says"),
    [
        ("Llama", 4, "resources.trainer.tensor 4 does not divide the model's num_key_value_heads 2; 2 would"),
        ("Llama", 3, "resources.trainer.tensor 3 does not divide the model's num_attention_heads 4; 2 would"),
        ("GPT2", 2, "transformers has no tensor parallel plan for GPT2LMHeadModel; it must be 1"),
        ("MiMoV2Flash", 2, r"the plan of MiMoV2FlashForCausalLM has layers\.\d\.mlp\.\S+ as '\w+', which"),
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
        parallelize(decoder(lm), type(lm).__name__, SimpleNamespace(size=lambda: ranks))  # type: ignore[arg-type]


def test_both_nearest_valid_sizes_are_named(tmp_path: Path) -> None:
    lm, _ = loading.build(
        save("Llama", tmp_path, num_attention_heads=12, num_key_value_heads=12, intermediate_size=48, hidden_size=48)
    )
    lora.attach(lm, LoraConfig(rank=2))
    with pytest.raises(UserError, match="5 does not divide the model's num_attention_heads 12; 4 or 6 would"):
        parallelize(decoder(lm), type(lm).__name__, SimpleNamespace(size=lambda: 5))  # type: ignore[arg-type]
