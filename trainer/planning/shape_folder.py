"""Model folders that have only a shape: a config.json of few layers, and a file of weights that takes no room.

A trace of all layers of a large model would take long and say nothing new: layers of one kind are alike. So the layers
are described as a beginning, a pattern that repeats, and an end, and a folder can be made with fewer repetitions.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ModelFolderError
from agentrl.trainer.models.policy import decoder
from agentrl.trainer.models.tensor_files import INDEX

LAYERS = "num_hidden_layers"
PER_LAYER = ("layer_types", "layers_block_type", "no_rope_layers")
"""Keys of a configuration that list a value for each layer."""
COUNTED_FROM_TOP = "max_window_layers"
MOST_LAYERS = 1000
LONGEST_PATTERN = 16


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model from the bottom: `beginning` single ones, then `times` repetitions of `period` layers."""

    beginning: int
    period: int
    times: int

    @property
    def count(self) -> int:
        """All layers."""
        return self.beginning + self.period * self.times

    def fewer(self, times: int) -> Layers:
        """The same with fewer repetitions."""
        return Layers(self.beginning, self.period, min(times, self.times))


def pattern(kinds: Sequence[Any]) -> Layers:
    """The shortest description of layers of these kinds."""
    found = [
        Layers(start, period, (len(kinds) - start) // period)
        for start in range(len(kinds))
        for period in range(1, min(LONGEST_PATTERN, len(kinds) - start) + 1)
        if (len(kinds) - start) % period == 0
        and all(kinds[i] == kinds[start + (i - start) % period] for i in range(start, len(kinds)))
    ]
    return min(found, key=lambda layers: (layers.beginning + layers.period, layers.beginning))


def layers_of(config: dict[str, Any]) -> Layers:
    """The layers of the model with this config.json. Raises ModelFolderError when transformers cannot make it."""
    blocks = decoder(on_meta(config)).layers
    return pattern([_kind(block) for block in blocks])


def _kind(block: torch.nn.Module) -> Any:
    """What tells one kind of layer from another: modules, shapes and the settings of its attention."""
    settings = {
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key != "layer_idx" and isinstance(value, (int, float, str, bool)) and not key.startswith("_")
    }
    return frozenset(settings), tuple((n, tuple(p.shape)) for n, p in block.named_parameters())


def on_meta(config: dict[str, Any]) -> Any:
    """The causal LM of a config.json without memory. Raises ModelFolderError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = dict(config)
    kind = known.pop("model_type", None)
    if kind is None:
        raise ModelFolderError("config.json has no model_type")
    if not 0 < int(known.get(LAYERS, 1)) <= MOST_LAYERS:
        raise ModelFolderError(f"config.json: {LAYERS} {known[LAYERS]} is not from 1 to {MOST_LAYERS}")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known), dtype=torch.float32)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise ModelFolderError(f"config.json: transformers cannot make this model: {error}") from error


def with_layers(config: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """The config.json with so many layers from the bottom."""
    cut = {key: config[key][: layers.count] for key in PER_LAYER if isinstance(config.get(key), list)}
    return config | cut | {LAYERS: layers.count}


def write_shape(folder: Path, config: dict[str, Any]) -> Path:
    """Make a model folder with this config.json whose weights are zeros that take no room on the disk.

    A tensor has a file of its own and one byte for each number, because a file is mapped into memory as a whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    tensors = {
        id(tensor): (name, tensor) for name, tensor in reversed(on_meta(config).state_dict(keep_vars=True).items())
    }
    for name, tensor in tensors.values():
        files[name] = f"{len(files)}.safetensors"
        about = {"dtype": "U8", "shape": list(tensor.shape), "data_offsets": [0, tensor.numel()]}
        text = json.dumps({name: about}).encode()
        with (folder / files[name]).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + tensor.numel())
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
