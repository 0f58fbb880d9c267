"""Models by name: made once, whole or not at all; what they promise about tokens and weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import agentrl.models as models
from agentrl.errors import ModelFolderError
from agentrl.models import check_model_folder, make_model, resolve_model, smollm2, tiny


def fill(folder: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")


def test_a_folder_of_yours_is_taken_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_missing_model_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="did you mean 'smollm2'"):
        resolve_model("smollm")
    with pytest.raises(ModelFolderError, match="does not exist"):
        resolve_model(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"no weights .* no a tokenizer|no weights"):
        check_model_folder(tmp_path)


def test_linear_layers_are_the_matrices_of_the_blocks(tiny_model: Path, tmp_path: Path) -> None:
    assert models.linear_layers(tiny_model) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelFolderError, match=r"model.safetensors cannot be read"):
        models.linear_layers(tmp_path)


def test_a_model_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        fill(folder)

    monkeypatch.setattr(models, "_builder", lambda name: build)
    first, second = resolve_model("tiny", tmp_path), resolve_model("tiny", tmp_path)
    assert first == second == tmp_path / "tiny"
    assert len(built) == 1
    assert built[0] != first  # made beside it, then renamed


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_builder", lambda name: build)
    with pytest.raises(KeyboardInterrupt):
        make_model("tiny", tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    assert models.cache_dir() == tmp_path / "models"


def test_rotary_permutation_is_undone() -> None:
    """llama.cpp stores row 2i of a head's first half beside row 2i+1 of its second half."""
    n_heads, head_dim, columns = 3, 8, 5
    original = np.arange(n_heads * head_dim * columns, dtype=np.float32).reshape(n_heads * head_dim, columns)
    permuted = original.reshape(n_heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(permuted, original)
    np.testing.assert_array_equal(smollm2.undo_rotary_permutation(permuted, n_heads), original)


def test_smollm2_splits_digits_and_keeps_its_template(smollm2_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_model / "tokenizer.json"))
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 2
    text = "Grüße, 世界!\n\tdef f(x):  return x + 12  # <|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert "<|im_start|>" in (smollm2_model / "chat_template.jinja").read_text()
    assert json.loads((smollm2_model / "config.json").read_text())["tie_word_embeddings"] is True


def test_smollm2_completes_a_known_fact(smollm2_model: Path) -> None:
    """A wrong permutation, norm or tokenizer makes the model talk nonsense."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_model)
    model = AutoModelForCausalLM.from_pretrained(smollm2_model)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"


def test_tiny_encodes_any_text_one_token_per_byte(tiny_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text = "Grüße, 世界!\n"
    assert len(tokenizer.encode(text).ids) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [tiny.IM_START, tiny.IM_END]


def test_tiny_solves_some_of_its_tasks(tiny_model: Path) -> None:
    """Good enough to be rewarded at times, bad enough to learn from it."""
    import random

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rng = random.Random(123)
    words = [tiny.random_word(rng) for _ in range(300)]
    accuracy = tiny.sampled_accuracy(model, tiny.encode(words, tiny.make_tokenizer()))
    assert 0.2 < accuracy < 0.7
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 500_000


@pytest.mark.long
def test_smollm2_is_converted_the_same_each_time(smollm2_model: Path, tmp_path: Path) -> None:
    made = make_model("smollm2", tmp_path / "smollm2")
    assert {file.name for file in made.iterdir()} == {file.name for file in smollm2_model.iterdir()}
    for file in made.iterdir():
        assert file.read_bytes() == (smollm2_model / file.name).read_bytes(), file.name
