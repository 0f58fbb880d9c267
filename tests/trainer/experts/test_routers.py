"""Routers of many families: their own choice replayed changes nothing, and another choice gets the family's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import DELTA, EXPERTS, EXPERTS_LOCAL, LATENT, SIZES

from agentrl.errors import ModelFolderError
from agentrl.trainer.experts.routers import ChoosesTopK, find_routers
from agentrl.trainer.models.policy import decoder

N = 40
GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


def softmax(logits, chosen):
    return logits.softmax(-1).gather(-1, chosen)


def normalized(logits, chosen):
    return logits.gather(-1, chosen).softmax(-1)  # softmax, renormalized over the chosen ones


def sigmoid(logits, chosen):
    weights = logits.sigmoid().gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True)


FAMILIES: dict[str, tuple[dict[str, Any], Any]] = {
    "Qwen2Moe": (EXPERTS | {"shared_expert_intermediate_size": 16}, softmax),
    "Qwen3Moe": (EXPERTS | {"norm_topk_prob": True}, normalized),
    "Qwen3Next": (EXPERTS | DELTA | {"shared_expert_intermediate_size": 16}, normalized),
    "Mixtral": (EXPERTS_LOCAL, normalized),
    "Olmoe": (EXPERTS, softmax),
    "GptOss": (
        EXPERTS_LOCAL | {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        normalized,
    ),
    "GraniteMoe": (EXPERTS_LOCAL, normalized),
    "Ernie4_5_Moe": ({"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16}, normalized),
    "DeepseekV3": (LATENT | GROUPED | {"routed_scaling_factor": 1.0}, sigmoid),
    "Glm4Moe": (GROUPED | {"head_dim": 8, "routed_scaling_factor": 1.0}, sigmoid),
    "MiniMaxM2": (EXPERTS_LOCAL | {"head_dim": 8}, sigmoid),
}
"""Family → its configuration, and the weights of chosen experts as its paper has them."""


def model_of(family: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | settings))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("family", "settings", "weigh"), [(f, *rest) for f, rest in FAMILIES.items()], ids=FAMILIES)
def test_a_given_choice_gets_the_weights_of_its_family(family, settings, weigh) -> None:
    router = find_routers(decoder(model_of(family, settings)).layers)[-1]
    hidden = torch.randn(N, SIZES["hidden_size"])
    bias = (torch.zeros(router.experts),) if family == "MiniMaxM2" else ()
    own = ChoosesTopK(router)
    with own:
        before = router.module(hidden, *bias)
    assert own.experts_Nk is not None
    logits = before[router.logits_at]
    same = ChoosesTopK(router, own.experts_Nk, torch.ones(N, dtype=torch.bool))
    with same:
        again = router.module(hidden, *bias)
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    other = torch.rand(N, router.experts).argsort(-1)[:, : router.top_k]
    has = torch.rand(N) < 0.7
    with ChoosesTopK(router, other, has):
        mixed = router.module(hidden, *bias)
    chosen = torch.where(has[:, None], other, own.experts_Nk)
    weights, experts = sorted((one for i, one in enumerate(mixed) if i != router.logits_at), key=_is_whole)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, weigh(logits.float(), chosen))
    (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), router.module.weight)
    assert gradient.abs().sum() > 0


def _is_whole(one: torch.Tensor) -> bool:
    return not one.dtype.is_floating_point


@pytest.mark.parametrize("family", ["Phimoe", "Afmoe"])
def test_a_router_that_chooses_otherwise_is_refused_in_one_line(family) -> None:
    settings = EXPERTS_LOCAL | {"num_experts_per_tok": 2} if family == "Phimoe" else EXPERTS
    with pytest.raises(
        ModelFolderError, match=r"^\w+Router, \S+ of decoder block \d, .*: its choice cannot be replayed$"
    ):
        find_routers(decoder(model_of(family, settings)).layers)


def test_a_model_without_experts_has_no_routers() -> None:
    assert find_routers(decoder(model_of("Qwen3", {})).layers) == []
