"""Mixtures whose experts cannot be given to ranks are refused by name; those that can have whole experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from layouts import save

from agentrl.errors import UserError
from agentrl.trainer.models import loading
from agentrl.trainer.models.policy import decoder
from agentrl.trainer.parallel.expert_parallel import plan_of, spread
from agentrl.trainer.parallel.mesh import Mesh


def group(ranks: int) -> Any:
    return SimpleNamespace(size=lambda: ranks)


@pytest.mark.parametrize(
    ("name", "mesh", "says"),
    [
        ("qwen3", {"experts": group(2)}, "experts: transformers has no expert parallel plan for Qwen3ForCausalLM"),
        ("mixture", {"experts": group(3)}, "experts 3 does not divide the 4 experts of Qwen3MoeForCausalLM; 2 or 4"),
        ("mixture", {"experts": group(8)}, "experts 8 does not divide the 4 experts of Qwen3MoeForCausalLM; 4 would"),
    ],
)
def test_a_model_whose_experts_cannot_be_spread_is_named(
    tmp_path: Path, name: str, mesh: dict[str, Any], says: str
) -> None:
    lm, _ = loading.build(save(name, tmp_path))
    with pytest.raises(UserError, match=rf"resources\.trainer\.{says}"):
        spread(decoder(lm), type(lm).__name__, Mesh(group(8), group(8), **mesh))


def test_a_tensor_group_too_small_for_the_experts_names_its_own_key(tmp_path: Path) -> None:
    lm, _ = loading.build(save("mixture", tmp_path))
    three = group(3)
    with pytest.raises(UserError, match=r"resources\.trainer\.tensor 3 does not divide the 4 experts"):
        spread(decoder(lm), type(lm).__name__, Mesh(group(3), group(1), tensor=three, experts=three))


def test_a_tensor_group_leaves_a_model_without_experts_alone(tmp_path: Path) -> None:
    lm, _ = loading.build(save("qwen3", tmp_path))
    two = group(2)
    assert spread(decoder(lm), "Qwen3", Mesh(group(2), group(1), tensor=two, experts=two)) == []


def test_every_mixture_that_transformers_plans_to_dispatch_has_a_plan_here() -> None:
    import transformers

    planned = {
        family: bool(plan_of(SimpleNamespace(config=getattr(transformers, f"{family}Config")())))
        for family in ("Qwen3Moe", "Qwen2Moe", "Mixtral", "DeepseekV3", "GptOss", "Glm4Moe", "Qwen3", "Llama4Text")
    }
    assert {family for family, found in planned.items() if not found} == {"Qwen3", "Llama4Text"}
