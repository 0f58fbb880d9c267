"""Adapters and checkpoints of another model are refused before an engine reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from adapters import write_adapter
from safetensors.numpy import save_file

from agentrl.engine.checks.adapter_checks import CONFIG
from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.errors import ModelFolderError
from agentrl.versions.weights_folder import ADAPTER, TENSORS

Tensors = dict[str, npt.NDArray[Any]]
LAYER = "model.layers.0.self_attn"
PEFT = "base_model.model."
SIZES = {"q_proj": (8, 6), "k_proj": (4, 6), "v_proj": (4, 6), "o_proj": (6, 8)}
RANK = 2


def matrices(*shape: int) -> npt.NDArray[Any]:
    return np.zeros(shape, np.float32)


def base_tensors() -> Tensors:
    layers = {f"{LAYER}.{name}.weight": matrices(*size) for name, size in SIZES.items()}
    return layers | {"model.norm.weight": matrices(6), "model.embed_tokens.weight": matrices(10, 6)}


def pair(layer: str, *, into: int, out: int, rank: int = RANK) -> Tensors:
    names = (f"{PEFT}{layer}.lora_{half}.weight" for half in "AB")
    return dict(zip(names, (matrices(rank, into), matrices(out, rank)), strict=True))


def adapter_of(name: str, rank: int = RANK) -> Tensors:
    out, into = SIZES[name]
    return pair(f"{LAYER}.{name}", into=into, out=out, rank=rank)


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / (TENSORS if config is None else ADAPTER))
    if config is not None:
        (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 4} | config))
    return folder


@pytest.fixture
def checks(tmp_path: Path) -> LoadChecks:
    return LoadChecks(write(tmp_path / "base", base_tensors()))


def test_all_tensors_and_some_of_them_in_another_float_type_are_loaded(checks: LoadChecks, tmp_path: Path) -> None:
    checks.checkpoint(write(tmp_path / "all", base_tensors()))
    half = {"model.norm.weight": np.zeros(6, np.float16)}
    checks.checkpoint(write(tmp_path / "some", half))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": matrices(10, 6)}, "the model has no tensor lm_head.weight"),
        ({f"x{i}": matrices(1) for i in range(5)}, "the model has no tensor x0, x1, x2 and 2 more"),
        ({"model.norm.weight": matrices(7)}, r"model.norm.weight has shape \[7\], the model's \[6\]"),
        ({f"{LAYER}.o_proj.weight": matrices(8, 6)}, r"o_proj.weight has shape \[8, 6\], the model's \[6, 8\]"),
        ({"model.norm.weight": np.zeros(6, np.int32)}, "model.norm.weight has type I32, the model's F32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    checks: LoadChecks, tmp_path: Path, change: Tensors, message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message):
        checks.checkpoint(write(tmp_path / "v1", base_tensors() | change))


def test_folders_without_readable_tensors_are_refused(checks: LoadChecks, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no such folder: .*/v1"):
        checks.checkpoint(tmp_path / "v1")
    (tmp_path / "v1").mkdir()
    with pytest.raises(ModelFolderError, match="v1 has no safetensors files"):
        checks.checkpoint(tmp_path / "v1")
    for content in (b"", b"\xff" * 100, (10).to_bytes(8, "little") + b'{"a": {}} '):
        (tmp_path / "v1" / TENSORS).write_bytes(content)
        with pytest.raises(ModelFolderError, match="v1 cannot be read: "):
            checks.checkpoint(tmp_path / "v1")


def test_an_adapter_that_the_trainer_wrote_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    checks = LoadChecks(tiny_model)
    checks.adapter(write_adapter(tmp_path / "v1-a", tiny_model, seed=1, rank=4, targets=["q_proj", "o_proj"]))
    checks.adapter(write_adapter(tmp_path / "v2-a", tiny_model, seed=1, rank=8))


def test_an_adapter_is_found_under_the_prefix_of_the_models_files(tmp_path: Path) -> None:
    renamed = {name.replace("model.", "model.language_model."): value for name, value in base_tensors().items()}
    checks = LoadChecks(write(tmp_path / "base", renamed))
    checks.adapter(write(tmp_path / "v1", adapter_of("o_proj"), {}))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (adapter_of("q_proj"), {}, "an adapter of .*q_proj but none of .*k_proj: engines fuse the two"),
        (adapter_of("o_proj", rank=3), {}, r"o_proj has matrices of shape \[3, 8\] and \[6, 3\].*not rank 2"),
        (adapter_of("o_proj"), {"r": 0}, "r must be a positive integer, not 0"),
        (adapter_of("o_proj"), {"use_rslora": True}, "engines do not apply use_rslora: true"),
        (adapter_of("o_proj"), {"rank_pattern": {"o_proj": 4}}, 'do not apply rank_pattern: {"o_proj": 4}'),
        (adapter_of("o_proj"), {"modules_to_save": ["lm_head"]}, "do not apply modules_to_save"),
        (adapter_of("o_proj"), {"peft_type": "LOHA"}, "does not describe an adapter of peft_type LORA"),
        ({f"{PEFT}{LAYER}.o_proj.lora_A.weight": matrices(2, 8)}, {}, "o_proj has only one of lora_A and lora_B"),
        ({f"{PEFT}lm_head.lora_embedding_A": matrices(2, 6)}, {}, "is not a matrix of an adapter"),
        ({}, {}, "has no tensors of an adapter"),
        (
            pair(f"{LAYER}.o_proj", into=9, out=6),
            {},
            r"the adapter of .*o_proj is for a matrix \[6, 9\], the model's is \[6, 8\]",
        ),
        (
            pair("model.layers.1.x", into=8, out=6),
            {},
            "an adapter of model.layers.1.x, which the model has not",
        ),
    ],
)
def test_an_adapter_that_an_engine_would_use_wrongly_is_refused(
    checks: LoadChecks, tmp_path: Path, tensors: Tensors, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message):
        checks.adapter(write(tmp_path / "v1", tensors, config))


def test_without_the_base_models_tensors_the_form_is_checked(tmp_path: Path) -> None:
    checks = LoadChecks(tmp_path / "absent")
    checks.adapter(write(tmp_path / "v1", adapter_of("q_proj"), {}))
    checks.checkpoint(write(tmp_path / "v2", {"any": matrices(1)}))
    (tmp_path / "v1" / CONFIG).write_text("{")
    with pytest.raises(ModelFolderError, match=r"adapter_config.json cannot be read"):
        checks.adapter(tmp_path / "v1")


def test_a_base_model_that_could_not_be_read_once_is_read_again(tmp_path: Path) -> None:
    checks, other = LoadChecks(tmp_path / "base"), write(tmp_path / "other", {"other": matrices(2)})
    checks.checkpoint(other)  # nothing to compare it with
    write(tmp_path / "base", base_tensors())
    with pytest.raises(ModelFolderError, match="the model has no tensor other"):
        checks.checkpoint(other)
