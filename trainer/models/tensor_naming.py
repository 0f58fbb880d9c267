"""Maps names of tensors in a model's files to names in the model, where the two differ.

A file may, for example, hold a block's experts one by one where the module has one parameter for all of them. The rules
are those with which transformers loads and saves (`transformers.conversion_mapping`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from agentrl.errors import ModelFolderError


@dataclass(frozen=True, slots=True)
class Fused:
    """Tensors of files that form one parameter together, or one tensor that forms several; `first` is one such
    parameter.
    """

    first: str
    parts: dict[str, list[str]]  # pattern of the rule → the names in the files that match it, in order
    rule: Any  # transformers' WeightConverter

    @property
    def names(self) -> set[str]:
        """The names in the files."""
        return {name for names in self.parts.values() for name in names}

    @property
    def stacked(self) -> bool:
        """Whether element i of the parameter's first dimension is made only of the i-th name of each pattern."""
        from transformers.core_model_loading import MergeModulelist

        first, *others = self.rule.operations
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(getattr(o, "dim", 0) for o in others)

    def made(self, read: Callable[[str], Tensor], chosen: slice = slice(None)) -> dict[str, Tensor]:
        """The parameters by name; of a stacked one, the `chosen` elements. `read` returns a tensor of the files.

        Raises ModelFolderError when the tensors do not fit together.
        """
        rule = copy.deepcopy(self.rule)
        for pattern, names in self.parts.items():
            for name in names[chosen]:
                rule.add_tensor(self.first, name, pattern, read(name))
        try:
            made: dict[str, Any] = rule.convert(self.first)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelFolderError(f"{self.first} cannot be made of the files' tensors: {error}") from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@dataclass(frozen=True, slots=True)
class Names:
    """Maps the tensors of a folder's files to the tensors of the model."""

    plain: dict[str, str]  # name in the files → name in the model (of tied parameters, the first name)
    fused: list[Fused] = field(default_factory=list)
    rules: list[Any] = field(default_factory=list)  # transformers' rules for fused parameters
    config: Any = None  # of the model

    def in_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors by the files' names; a tied tensor under each of its names there.

        Leaves out tensors that the files do not have. Raises ModelFolderError when transformers cannot split a fused
        parameter.
        """
        found = {stored: tensors[name] for stored, name in self.plain.items() if name in tensors}
        whole = {f.first: tensors[f.first] for f in self.fused if f.first in tensors}
        if whole:
            from transformers.core_model_loading import revert_weight_conversion

            model: Any = SimpleNamespace(_weight_conversions=self.rules, config=self.config)
            apart = revert_weight_conversion(model, whole)
            expected = {name for f in self.fused if f.first in whole for name in f.names}
            if apart.keys() != expected:
                raise ModelFolderError(f"{', '.join(whole)} cannot be converted to the tensors of the model's folder")
            found |= {name: tensor.contiguous() for name, tensor in apart.items()}
        return found


def match(lm: Any, files: Iterable[str], known: Mapping[str, str]) -> Names:
    """Map the tensors named `files` to tensors of `lm`. `known` maps names of its tensors to the tensors' own names.

    When the model knows all names of the files, they are used unchanged. A name that matches nothing stays unchanged.
    """
    names = list(files)
    if known.keys() >= set(names):
        return Names({name: known[name] for name in names})
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    plain: dict[str, str] = {}
    fused: dict[str, Fused] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if target not in known:
            plain[name] = known.get(name, name)
        elif pattern is None:
            plain[name] = known[target]
        else:
            made = fused.setdefault(target, Fused(target, {}, by_pattern[pattern]))
            made.parts.setdefault(pattern, []).append(name)
    return Names(plain, list(fused.values()), [rule for rule in rules if rule.was_used()], lm.config)
