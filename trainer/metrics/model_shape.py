"""The sizes of a transformer that its weight products have, from the configuration in its folder. Without torch.

A block of a mixture has many experts; each token uses a few of them. Its shape counts the experts that a token uses
(`active`) and those that there are (`parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts of a block."""
MIXTURES = {
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "gpt_oss": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
    "glm4_moe": "moe_intermediate_size",
    "deepseek_v3": "moe_intermediate_size",
}
"""Known mixtures: their `model_type` → the key of an expert's width."""
UNGATED = ("phi", "starcoder2", "nemotron", "gpt_neox")
"""Models whose MLP has two matrices; all others are counted with three."""
FULL = "full_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Elements of the matrices of one decoder block."""

    attention: int
    active: int  # of the MLP, or of the router, the shared expert and the experts that one token uses
    all: int  # the same with every expert

    @property
    def products(self) -> int:
        """Multiplications of one token."""
        return self.attention + self.active

    @property
    def parameters(self) -> int:
        """Elements in memory."""
        return self.attention + self.all


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A transformer's sizes; norms and biases are left out."""

    hidden: int
    vocabulary: int
    tied: bool
    blocks: tuple[Block, ...]  # from the bottom
    pair: int  # multiplications for each query and key of one block: of the scores and of the values
    full_attention: tuple[bool, ...]  # by block: whether a query sees all tokens before it
    widest: int  # elements that a block keeps of one token for the backward pass, without its norms

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        return sum(block.parameters for block in self.blocks) + self.head * (1 if self.tied else 2)

    @property
    def head(self) -> int:
        """Elements of the output head."""
        return self.hidden * self.vocabulary


def shape_of(model: Mapping[str, Any]) -> Shape | None:
    """The shape of a model's configuration; None for an architecture that is not known.

    Known are blocks of attention and a gated MLP, and the mixtures of `MIXTURES`.
    """
    kind = model.get("model_type", "")
    experts = next((int(model[key]) for key in EXPERTS if model.get(key)), 0)
    layer_types = model.get("layer_types") or []
    if not all(model.get(size) for size in SIZES) or kind in UNGATED or (experts and kind not in MIXTURES):
        return None
    if any("attention" not in kind or "linear" in kind for kind in layer_types):
        return None  # blocks with a state in place of attention
    blocks = tuple(_block(model, experts, number) for number in range(model["num_hidden_layers"]))
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    query, value = _head_sizes(model)
    keys = heads if "kv_lora_rank" in model else model["num_key_value_heads"]
    sees_all = not (model.get("sliding_window") and model.get("use_sliding_window", True))
    routed = (
        model["num_experts_per_tok"] if experts else 0
    )  # copies of a token's state to its experts, and their outputs
    width = max(block.active // (3 * hidden) for block in blocks)
    return Shape(
        hidden=hidden,
        vocabulary=model["vocab_size"],
        tied=bool(model.get("tie_word_embeddings")),
        blocks=blocks,
        pair=heads * (query + value),
        full_attention=tuple(kind == FULL for kind in layer_types) or (sees_all,) * len(blocks),
        widest=(4 + 2 * routed) * hidden + (heads + keys) * (query + value) + 4 * width,
    )


def _block(model: Mapping[str, Any], experts: int, number: int) -> Block:
    hidden = model["hidden_size"]
    if not experts or not _is_mixed(model, number):
        mlp = 3 * hidden * model["intermediate_size"]
        return Block(attention=_attention(model), active=mlp, all=mlp)
    width = model[MIXTURES[model["model_type"]]]
    shared = (model.get("n_shared_experts") or 0) * width
    if model["model_type"] == "qwen2_moe":
        shared = model["shared_expert_intermediate_size"]
    always = hidden * experts + 3 * hidden * shared + (hidden if model["model_type"] == "qwen2_moe" else 0)
    return Block(
        attention=_attention(model),
        active=always + 3 * hidden * width * model["num_experts_per_tok"],
        all=always + 3 * hidden * width * experts,
    )


def _is_mixed(model: Mapping[str, Any], number: int) -> bool:
    """Whether a mixture's block has experts, rather than one MLP."""
    if number < (model.get("first_k_dense_replace") or 0) or number in (model.get("mlp_only_layers") or []):
        return False
    return (number + 1) % (model.get("decoder_sparse_step") or 1) == 0


def _head_sizes(model: Mapping[str, Any]) -> tuple[int, int]:
    """Sizes of a head's queries and of its values."""
    if "kv_lora_rank" in model:
        return model["qk_nope_head_dim"] + model["qk_rope_head_dim"], model["v_head_dim"]
    size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return size, size


def _attention(model: Mapping[str, Any]) -> int:
    """Elements of one block's projections. With low ranks (DeepSeek) queries, keys and values have two each."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    query, value = _head_sizes(model)
    if "kv_lora_rank" not in model:
        return int(hidden * (2 * heads * query + 2 * model["num_key_value_heads"] * query))
    low, keys = model.get("q_lora_rank"), model["kv_lora_rank"]
    queries = low * (hidden + heads * query) if low else hidden * heads * query
    compressed = hidden * (keys + model["qk_rope_head_dim"])
    return int(queries + compressed + keys * heads * (model["qk_nope_head_dim"] + value) + heads * value * hidden)
