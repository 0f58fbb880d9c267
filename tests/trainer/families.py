"""Small random models of many families: one or more for each mechanism that mixes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "initializer_range": 0.1,
}
MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA_2: dict[str, Any] = MAMBA | {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "factor": 16.0,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
TWO_KINDS = ["sliding_attention", "full_attention"] * 2
PACKED, UNPACKED, REFUSED = "packed", "unpacked", "refused"
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": (PACKED, "Llama", {"num_key_value_heads": 4}),
    "Llama, dynamic NTK": (
        REFUSED,
        "Llama",
        {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "Llama 4": (
        UNPACKED,
        "Llama4Text",
        EXPERTS_LOCAL
        | {
            "head_dim": 8,
            "attention_chunk_size": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "Qwen2": (PACKED, "Qwen2", {}),
    "Qwen2-MoE, sliding": (
        UNPACKED,
        "Qwen2Moe",
        EXPERTS
        | {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Qwen3": (PACKED, "Qwen3", {"head_dim": 12}),
    "Qwen3-MoE": (PACKED, "Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 12}),
    "Qwen3-Next": (PACKED, "Qwen3Next", EXPERTS | DELTA | {"shared_expert_intermediate_size": 16}),
    "Qwen3.5": (PACKED, "Qwen3_5Text", DELTA),
    "Qwen3.5-MoE": (PACKED, "Qwen3_5MoeText", EXPERTS | DELTA | {"shared_expert_intermediate_size": 16}),
    "Mistral, sliding": (PACKED, "Mistral", {"sliding_window": 16}),
    "Mixtral": (PACKED, "Mixtral", EXPERTS_LOCAL),
    "Gemma 2": (REFUSED, "Gemma2", {"head_dim": 8}),
    "Gemma 2, no cap of logits": (
        UNPACKED,
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 16,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "Gemma 3": (PACKED, "Gemma3Text", {"head_dim": 8, "sliding_window": 16, "layer_types": TWO_KINDS}),
    "gpt-oss": (PACKED, "GptOss", EXPERTS_LOCAL | {"head_dim": 8, "sliding_window": 16}),
    "Phi-3": (PACKED, "Phi3", {}),
    "Phi-3, longrope": (UNPACKED, "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "Phi-3.5-MoE, sliding": (UNPACKED, "Phimoe", EXPERTS_LOCAL | {"sliding_window": 16}),
    "LFM2": (PACKED, "Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "LFM2, experts": (
        PACKED,
        "Lfm2Moe",
        EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, "conv_bias": True},
    ),
    "Kimi linear": (
        PACKED,
        "KimiLinear",
        LATENT
        | EXPERTS
        | {
            "q_lora_rank": None,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "Zamba2": (
        PACKED,
        "Zamba2",
        MAMBA
        | {
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "initializer_range": 0.1,
        },
    ),
    "Jamba": (
        UNPACKED,
        "Jamba",
        MAMBA
        | {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
    ),
    "Bamba": (PACKED, "Bamba", MAMBA_2 | {"attn_layer_indices": [1, 3]}),
    "Nemotron-H": (
        PACKED,
        "NemotronH",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 8,
        },
    ),
    "Granite": (PACKED, "Granite", {"logits_scaling": 4.0}),
    "Granite 4 hybrid": (
        PACKED,
        "GraniteMoeHybrid",
        MAMBA_2
        | {
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 16,
            "num_local_experts": 0,
            "logits_scaling": 4.0,
        },
    ),
    "Granite SWA": (PACKED, "GraniteSWA", {"sliding_window": 16}),
    "Falcon-H1": (PACKED, "FalconH1", MAMBA_2 | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "Falcon, ALiBi": (UNPACKED, "Falcon", {"alibi": True, "new_decoder_architecture": False}),
    "Mamba 2": (
        PACKED,
        "Mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    ),
    "SmolLM3": (PACKED, "SmolLM3", {}),
    "OLMo 3": (PACKED, "Olmo3", {"sliding_window": 16}),
    "OLMo hybrid": (PACKED, "OlmoHybrid", {"initializer_range": 0.1}),
    "Cohere 2": (PACKED, "Cohere2", {"sliding_window": 16, "logit_scale": 0.25}),
    "GLM-4": (PACKED, "Glm4", {"head_dim": 8}),
    "DeepSeek V3": (
        PACKED,
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "MiniMax": (
        UNPACKED,
        "MiniMax",
        EXPERTS_LOCAL | {"head_dim": 8, "block_size": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "MiniCPM3": (PACKED, "MiniCPM3", LATENT | {"dim_model_base": 8}),
    "Apertus": (PACKED, "Apertus", {}),
    "nanochat": (REFUSED, "NanoChat", {}),
    "GPT-2": (PACKED, "GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "RWKV": (REFUSED, "Rwkv", {"attention_hidden_size": 32}),
}
"""Name → how the trainer computes it, the class of its configuration, and what is special in that."""


def save_family(name: str, folder: Path, seed: int = 0) -> Path:
    """A model of the family."""
    import transformers

    _, family, settings = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | settings))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
