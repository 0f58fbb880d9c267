"""The tensors of a version: what the trained parameters are in the base model's files, and how they are made.

plain       a parameter is a tensor of the files, in the version's type
fused       a parameter is several tensors of the files, such as a block's experts
adapter     two parameters, merged with a matrix of the base model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.trainer.models import lora, tensor_files
from agentrl.trainer.models.tensor_naming import Fused, Names
from agentrl.trainer.weights.engine_digests import engine_name, part_order
from agentrl.trainer.weights.ownership import Output, Unit
from agentrl.trainer.weights.tensor_file_layout import TYPES

Dtypes = Callable[[str, tuple[int, ...], torch.dtype], torch.dtype]
"""The type of a tensor in a version, from its name, its shape and the type of its parameter."""


def for_engines(dtype: torch.dtype) -> Dtypes:
    """Matrices have the engines' type. Vectors (norms, biases) keep theirs: some engines keep them in float32."""
    return lambda name, shape, own: dtype if len(shape) > 1 else own


def as_in(base_model: Path) -> Dtypes:
    """Every tensor has its type in the base model's files."""
    files = tensor_files.files_of(base_model)
    types = {name: found.get_dtype() for name, found in tensor_files.stored_in(files, files.keys())}
    return lambda name, shape, own: TYPES[types[name]]


def units(
    parameters: Mapping[str, Tensor], base_model: Path, names: Names, adapter: AdapterConfig, dtypes: Dtypes
) -> list[Unit]:
    """The units of a version; of a family, in the order of the engine's tensor. Reads only headers.

    Parameters that the files do not have are left out. Raises ModelFolderError when an adapter cannot be merged.
    """
    make = _merged if adapter.rank else _whole
    found = make(parameters, base_model, names, adapter, dtypes)
    return sorted(found, key=lambda unit: part_order(unit.outputs[0].name))


def _whole(
    parameters: Mapping[str, Tensor], base_model: Path, names: Names, adapter: AdapterConfig, dtypes: Dtypes
) -> list[Unit]:
    plain = {stored: name for stored, name in names.plain.items() if name in parameters}
    fused = [one for one in names.fused if one.first in parameters]
    parts = {name for one in fused for found in one.parts.values() for name in found}
    shapes = _shapes(base_model, plain.keys() | parts)
    return [
        *(_plain(stored, name, parameters[name], dtypes) for stored, name in plain.items()),
        *(_fused(one, names, parameters[one.first], shapes, dtypes) for one in fused),
    ]


def _plain(stored: str, name: str, parameter: Tensor, dtypes: Dtypes) -> Unit:
    shape = tuple(parameter.shape)
    dtype = dtypes(stored, shape, parameter.dtype)
    return Unit((name,), (Output(stored, dtype, shape),), dtype, engine_name(stored))


def _fused(
    fused: Fused, names: Names, parameter: Tensor, shapes: Mapping[str, tuple[int, ...]], dtypes: Dtypes
) -> Unit:
    stored = [name for found in fused.parts.values() for name in found]
    outputs = tuple(Output(name, dtypes(name, shapes[name], parameter.dtype), shapes[name]) for name in stored)
    apart = Names({}, [fused], names.rules, names.config)
    types = {output.dtype for output in outputs}
    gathered = types.pop() if len(types) == 1 else parameter.dtype  # rounding and moving elements commute
    return Unit((fused.first,), outputs, gathered, fused.first, partial(_split, apart))


def _split(apart: Names, whole: Sequence[Tensor]) -> dict[str, Tensor]:
    return apart.in_files({apart.fused[0].first: whole[0]})


def _merged(
    parameters: Mapping[str, Tensor], base_model: Path, names: Names, adapter: AdapterConfig, dtypes: Dtypes
) -> list[Unit]:
    changed = lora.merged_names(parameters, base_model, names)
    shapes = _shapes(base_model, changed.keys())
    made = []
    for stored, layer in changed.items():
        output = Output(stored, dtypes(stored, shapes[stored], torch.float32), shapes[stored])
        pair = (layer + lora.A, layer + lora.B)
        merge = partial(_with_adapter, stored, base_model, adapter)
        made.append(Unit(pair, (output,), parameters[pair[0]].dtype, engine_name(stored), merge))
    return made


def _with_adapter(stored: str, base_model: Path, adapter: AdapterConfig, pair: Sequence[Tensor]) -> dict[str, Tensor]:
    ((_, base),) = tensor_files.stored(base_model, {stored})
    a, b = pair
    return {stored: lora.with_adapter(base[:], a, b, adapter)}


def _shapes(base_model: Path, names: Set[str]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(found.get_shape()) for name, found in tensor_files.stored(base_model, names)}
