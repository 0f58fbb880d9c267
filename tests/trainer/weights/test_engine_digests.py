"""Which tensors of a version an engine has under which names."""

from __future__ import annotations

import torch

from agentrl.trainer.weights.engine_digests import compared
from agentrl.trainer.weights.ownership import Output

LAYER = "model.layers.0"


def outputs(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Output]:
    return [Output(name, dtype, shape) for name, shape in shapes.items()]


def test_digests_cover_the_tensors_that_engines_keep() -> None:
    found = compared(
        outputs(
            {
                f"{LAYER}.self_attn.k_proj.weight": (3, 2),
                f"{LAYER}.self_attn.q_proj.weight": (3, 2),
                f"{LAYER}.self_attn.v_proj.weight": (3, 2),
                f"{LAYER}.mlp.up_proj.weight": (3, 2),  # without the gate
                "model.norm.weight": (4,),
                "model.embed_tokens.weight": (64, 2),
                "lm_head.weight": (3, 2),  # padded by engines
            }
        ),
        torch.float32,
    )
    assert found == {
        f"{LAYER}.self_attn.qkv_proj.weight": [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"],
        "model.norm.weight": ["model.norm.weight"],
        "model.embed_tokens.weight": ["model.embed_tokens.weight"],
    }


def test_tensors_of_another_type_than_the_engines_are_not_compared() -> None:
    """Engines may keep them in either."""
    made = [*outputs({"a.weight": (4, 4)}, torch.bfloat16), *outputs({"norm.weight": (4,)})]
    assert compared(made, torch.bfloat16) == {"a.weight": ["a.weight"]}
