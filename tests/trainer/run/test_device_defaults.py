"""What `auto` means on a device: compute type, and the tokens of a microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.metrics.model_shape import Shape, shape_of
from agentrl.trainer.run.device_defaults import (
    LEAST,
    MOST,
    STEP,
    UNKNOWN,
    RankDevice,
    compute_dtype,
    held_bytes,
    kept_bytes,
    microbatch_tokens,
    teacher_bytes,
)

GIB = 2**30
CPU = RankDevice(kind="cpu")
QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
SMALL = QWEN3_8B | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "num_hidden_layers": 4, "vocab_size": 64}


def shape(config: dict[str, Any]) -> Shape:
    found = shape_of(config)
    assert found is not None
    return found


def gpu(gib: float, shards: int = 1) -> RankDevice:
    return RankDevice(kind="cuda", memory_bytes=int(gib * GIB), shards=shards)


def test_the_type_is_the_devices_until_a_run_has_begun() -> None:
    assert compute_dtype(TrainerConfig(), "cpu") == "float32"
    assert compute_dtype(TrainerConfig(), "cuda") == "bfloat16"
    assert compute_dtype(TrainerConfig(), "cpu", "bfloat16") == "bfloat16"
    assert compute_dtype(TrainerConfig(), "cuda", "float32") == "float32"
    assert compute_dtype(TrainerConfig(dtype="float32"), "cuda") == "float32"


def test_numbers_are_kept_and_a_cpu_has_its_own() -> None:
    known = shape(QWEN3_8B)
    assert microbatch_tokens(TrainerConfig(tokens_per_microbatch=77), "bfloat16", known, gpu(80)) == 77
    assert microbatch_tokens(TrainerConfig(), "float32", known, CPU) == TrainerConfig().token_budget == 4096
    assert microbatch_tokens(TrainerConfig(), "bfloat16", None, gpu(80)) == UNKNOWN


def test_a_teacher_leaves_fewer_tokens() -> None:
    known, config = shape(QWEN3_8B), TrainerConfig(activation_checkpointing=True)
    alone = microbatch_tokens(config, "bfloat16", known, gpu(79.1, 8))
    taught = microbatch_tokens(config, "bfloat16", known, gpu(79.1, 8), [known])
    assert LEAST < taught < alone
    held = teacher_bytes(config, "bfloat16", known, 8)
    assert held == pytest.approx(8.19e9 * 4 / 8 + 2 * (2 * 0.193e9 + 1.245e9), rel=0.02)  # weights; gathered ones


@pytest.mark.parametrize(
    ("settings", "gib", "shards", "tokens"),
    [
        ({}, 79.1, 8, 5120),
        ({"activation_checkpointing": True}, 79.1, 8, 50176),
        ({"activation_checkpointing": True}, 139.8, 8, 113664),
        ({"activation_checkpointing": True, "lora": {"rank": 16}}, 79.1, 1, 39936),
        ({"activation_checkpointing": True, "cpu_offload": True}, 44.4, 1, 30720),
        ({"activation_checkpointing": True}, 23.6, 1, LEAST),
    ],
)
def test_an_8b_model_gets_these_microbatches(settings: dict[str, Any], gib: float, shards: int, tokens: int) -> None:
    assert microbatch_tokens(TrainerConfig(**settings), "bfloat16", shape(QWEN3_8B), gpu(gib, shards)) == tokens


@given(
    gib=st.floats(8, 300),
    more=st.floats(0, 100),
    shards=st.sampled_from([1, 2, 8, 64]),
    checkpointing=st.booleans(),
    critic=st.booleans(),
)
def test_more_memory_never_gives_fewer_tokens(
    gib: float, more: float, shards: int, checkpointing: bool, critic: bool
) -> None:
    preset = "ppo" if critic else "grpo"
    config = TrainerConfig(activation_checkpointing=checkpointing, algorithm={"preset": preset})
    less, greater = (microbatch_tokens(config, "bfloat16", shape(QWEN3_8B), gpu(g, shards)) for g in (gib, gib + more))
    assert LEAST <= less <= greater <= MOST
    assert less % STEP == 0
    if less > LEAST:  # what is planned fits
        used = held_bytes(config, "bfloat16", shape(QWEN3_8B), shards)
        assert used + less * kept_bytes(config, "bfloat16", shape(QWEN3_8B)) < gib * GIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_a_token_keeps_is_what_torch_saves(dtype: str, family: str) -> None:
    """Against the storages that autograd saves for a random model, per token: within a fifth."""
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256} if "moe" in family else {}
    config = transformers.AutoConfig.for_model(family, **SMALL | mixture)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def saved(tokens: int) -> int:
        found: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            at = tensor.untyped_storage().data_ptr()
            if at not in own:
                found[at] = tensor.untyped_storage().nbytes(), tensor.detach()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model.model(input_ids=torch.arange(tokens)[None] % 60, use_cache=False).last_hidden_state
        del out
        return sum(size for size, _ in found.values())

    each = (saved(1024) - saved(512)) / 512
    estimate = kept_bytes(TrainerConfig(), dtype, shape(config.to_dict()))
    print(f"{family} {dtype}: torch saves {each:.0f} bytes a token, the estimate is {estimate}")
    assert 0.8 * estimate < each < 1.2 * estimate
