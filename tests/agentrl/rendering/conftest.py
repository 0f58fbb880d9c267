"""Real tokenizers and tools of the rendering tests."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

patient = settings(suppress_health_check=[HealthCheck.too_slow])
"""Property tests judge results, never the speed of a busy machine."""

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template that SmolLM2-135M-Instruct ships."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's shape: `tool("calc", expression="string")`."""
    schema = {key: {"type": kind} for key, kind in properties.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": schema}},
    }


def call(name: str, arguments: str, id: str = "call_1") -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def byte_tokenizer(*special: str, markers: tuple[str, ...] = ()) -> Tokenizer:
    """256 byte tokens (with a few merges, so that ids are not characters), special tokens, single-id markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "l"), ("c", "al"), ("cal", "c"), ("Ã", "©"), ("Ċ", "Ċ"), ("u", "s"), ("us", "er")]
    vocab = {token: i for i, token in enumerate([*alphabet, "er"])}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("e", "r"), *merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    return tokenizer


def write_folder(path: Path, tokenizer: Tokenizer, template: str | None, **config: Any) -> Path:
    """A model folder as far as rendering reads it."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def published_template(name: str) -> str:
    """A model's own chat template, from the `trl` package where it is installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2's template and a small tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "smollm"
    return write_folder(folder, byte_tokenizer(*CHATML_TOKENS), SMOLLM2_TEMPLATE, max_position_embeddings=8192)
