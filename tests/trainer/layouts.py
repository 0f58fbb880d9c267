"""How ranks are laid out, the small models that they share, and when two updates are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.trainer.distributed import World
from agentrl.trainer.parallel.mesh import make_mesh

Found = dict[str, Tensor]
GROUPED: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_experts_per_tok": 2}
"""Sizes of mixtures: rows of grouped products have a multiple of 16 bytes."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),  # norms of heads, inside attention
    "phi3": ("Phi3", {"hidden_size": 32, "eos_token_id": 1}),  # several projections in one matrix
    "odd": ("Qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),  # heads that two and four do not divide
    "sinks": ("GptOss", GROUPED | {"num_local_experts": 4, "sliding_window": 9, "eos_token_id": 1}),
    "mixture": ("Qwen3Moe", GROUPED | {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "pair": ("Qwen3Moe", GROUPED | {"num_experts": 2, "moe_intermediate_size": 24}),  # fewer experts than ranks
}


class Layout(NamedTuple):
    """Sizes of `resources.trainer`."""

    replicas: int = 1
    tensor: int = 1
    context: int = 1
    experts: int = 1

    @classmethod
    def read(cls, text: str) -> Layout:
        return cls(*map(int, text.split("-")))

    def __str__(self) -> str:
        return "-".join(map(str, self))

    def of(self, world: World) -> World:
        """The same ranks, laid out so."""
        return replace(world, mesh=make_mesh("cpu", world.size, **self._asdict()))


def save(name: str, folder: Path, **settings: Any) -> Path:
    """A model of two blocks with four heads; sizes that two divides and four does not."""
    import transformers

    family, special = MODELS.get(name, (name, {}))
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
        | special
        | settings
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def assert_same(found: Found, expected: Found, case: str = "") -> None:
    """To 1e-5 of each number's and each tensor's size; of nothing (a bias of keys), nothing."""
    assert found.keys() == expected.keys()
    whole = {part: norm(expected, part) for part in {name.rpartition("/")[0] for name in expected}}
    for name, tensor in expected.items():
        gap = (found[name].double() - tensor.double()).norm().item()
        size = max(tensor.double().norm().item(), 1e-3 * whole[name.rpartition("/")[0]])
        assert gap <= 1e-5 * size, (case, name, gap, size)


def norm(tensors: Found, prefix: str) -> float:
    return float(sum(t.double().square().sum() for name, t in tensors.items() if name.startswith(prefix)) ** 0.5)
