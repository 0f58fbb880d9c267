"""A small random mixture of experts that SGLang and the trainer load, with the tiny model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.models import tiny


def save_served_mixture(folder: Path, seed: int = 0) -> Path:
    """A Qwen3-MoE: 3 layers, 2 of 8 experts; untied, as SGLang needs it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tiny.SPECIAL_TOKENS) + 256,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tiny.CONTEXT_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tiny.IM_END,
        pad_token_id=tiny.PAD,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tiny.make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config()))
    (folder / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)
    return folder
