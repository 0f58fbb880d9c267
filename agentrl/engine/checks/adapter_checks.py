"""Checks a low-rank adapter in peft's format. A is (rank, in), B is (out, rank), for a matrix (out, in)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import ModelFolderError
from agentrl.versions.tensor_header import Entry
from agentrl.versions.weights_folder import ADAPTER

CONFIG = "adapter_config.json"
COMPUTED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that engines fuse into one. SGLang needs an adapter for all of a group or for none. With an adapter for some,
it refuses the adapter or crashes when it first uses it."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
}
"""Settings that some engines ignore, with the values that change nothing; null is one for all."""
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class Pair(NamedTuple):
    """The two matrices of one layer."""

    a: Entry
    b: Entry


def check_adapter(folder: Path, found: Mapping[str, Entry], base: Mapping[str, Entry]) -> None:
    """Raise ModelFolderError unless the tensors `found` in a folder are an adapter for layers of the model `base`.

    Shapes are compared only if `base` is not empty.
    """
    rank = _rank(folder)
    if not (folder / ADAPTER).is_file():
        raise ModelFolderError(f"{folder} has no {ADAPTER}")
    layers = _pairs(folder, found)
    for layer, pair in layers.items():
        _check_pair(folder, layer, pair, rank)
        if base:
            _check_layer(folder, layer, pair, _matrices(layer, base))
    _check_groups(folder, layers.keys(), base)


def _rank(folder: Path) -> int:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelFolderError(f"{folder / CONFIG} does not describe an adapter of peft_type LORA")
    for name, neutral in NEUTRAL.items():
        value = config.get(name)
        if value is not None and value not in neutral:
            raise ModelFolderError(f"{folder / CONFIG}: engines do not apply {name}: {json.dumps(value)}")
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        raise ModelFolderError(f"{folder / CONFIG}: r must be a positive integer, not {json.dumps(rank)}")
    return rank


def _pairs(folder: Path, found: Mapping[str, Entry]) -> dict[str, Pair]:
    """The matrices by the names of their layers."""
    halves: dict[str, dict[str, Entry]] = {}
    for name, entry in found.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelFolderError(f"{folder}: {name} is not a matrix of an adapter (…lora_A.weight, …lora_B.weight)")
        halves.setdefault(match[1], {})[match[2]] = entry
    if not halves:
        raise ModelFolderError(f"{folder} has no tensors of an adapter")
    single = sorted(layer for layer, half in halves.items() if len(half) < len(Pair._fields))
    if single:
        raise ModelFolderError(f"{folder}: {single[0]} has only one of lora_A and lora_B")
    return {layer: Pair(half["A"], half["B"]) for layer, half in sorted(halves.items())}


def _check_pair(folder: Path, layer: str, pair: Pair, rank: int) -> None:
    shapes = pair.a.shape, pair.b.shape
    if [len(shape) for shape in shapes] != [2, 2] or (pair.a.shape[0], pair.b.shape[1]) != (rank, rank):
        shown = " and ".join(str(list(shape)) for shape in shapes)
        raise ModelFolderError(f"{folder}: {layer} has matrices of shape {shown}, which is not rank {rank}")


def _check_layer(folder: Path, layer: str, pair: Pair, matrices: list[Entry]) -> None:
    made = (pair.b.shape[0], pair.a.shape[1])
    if not matrices:
        raise ModelFolderError(f"{folder} has an adapter of {layer}, which the model has not")
    if made not in [matrix.shape for matrix in matrices]:
        wanted = list(matrices[0].shape)
        raise ModelFolderError(
            f"{folder}: the adapter of {layer} is for a matrix {list(made)}, the model's is {wanted}"
        )


def _matrices(layer: str, base: Mapping[str, Entry]) -> list[Entry]:
    """The model's matrices of a layer. Files may name it with another prefix than the model does."""
    exact = base.get(f"{layer}.weight")
    if exact is not None:
        return [exact]
    end = f".{layer.removeprefix('model.')}.weight"
    return [entry for name, entry in base.items() if name.endswith(end)]


def _check_groups(folder: Path, layers: Iterable[str], base: Mapping[str, Entry]) -> None:
    """Refuse an adapter of some of the layers that engines compute as one."""
    given = set(layers)
    for layer in sorted(given):
        parent, _, last = layer.rpartition(".")
        for name in next((group for group in COMPUTED_TOGETHER if last in group), ()):
            other = f"{parent}.{name}"
            if other not in given and _matrices(other, base):
                raise ModelFolderError(f"{folder} has an adapter of {layer} but none of {other}: engines fuse the two")
