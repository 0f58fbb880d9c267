"""Low-rank adapters by peft: chosen linear layers compute with W + alpha / rank · B·A, and only A and B train.

A is (rank, in) and B is (out, rank). Checkpoints hold A and B. Engines get either whole matrices, merged on the CPU
from the base model's files, or A and B in peft's format (`trainer.lora.publish`). A finished run writes both.

LoRA: arXiv 2106.09685, eq. 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.configs.trainer_config import ALL_LINEAR, AdapterConfig
from agentrl.engine.checks.adapter_checks import COMPUTED_TOGETHER
from agentrl.errors import ModelFolderError, UserError
from agentrl.files import atomic_folder
from agentrl.trainer.models import rank_parts, tensor_files
from agentrl.trainer.models.tensor_naming import Names
from agentrl.versions.weights_folder import ADAPTER

if TYPE_CHECKING:
    import peft

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
"""The ends of the names of an adapter's tensors, after the linear layer's name."""


def attach(lm: Any, config: AdapterConfig) -> None:
    """Add adapters, on the meta device, to the linear layers of `lm`, and freeze everything else.

    Raises UserError without peft, and when a target is not in the model or is not a plain linear layer.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise UserError("trainer.lora needs peft: pip install 'agentrl[lora]'") from error
    targets = _all_linear(lm) if config.targets == [ALL_LINEAR] else config.targets
    absent = [t for t in targets if config.targets != [ALL_LINEAR] and not _linear_layers(lm, t)]
    if absent:
        raise UserError(f"trainer.lora.targets: {type(lm).__name__} has no linear layer {', '.join(absent)}")
    # Given a model of transformers, peft would also adapt the fused experts and the router of a mixture.
    inject_adapter_in_model(_peft_config(config, targets), nn.ModuleList([lm]), low_cpu_mem_usage=True)


@torch.no_grad()
def initialise(lm: nn.Module) -> None:
    """Initialize A as peft does (Kaiming, uniform) and B to zero, so that the policy starts as the base model.

    The result does not depend on the number of ranks: each draws all of A from rank 0's seed and keeps its part.
    Collective.
    """
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed[0])
    for name, parameter in lm.named_parameters():
        if name.endswith(A):
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            local, part = rank_parts.owned(parameter)
            local.copy_(whole[part])
        elif name.endswith(B):
            parameter.zero_()


def merged(adapter: dict[str, Tensor], base_model: Path, names: Names, config: AdapterConfig) -> dict[str, Tensor]:
    """The matrices that an adapter changes, with the adapter merged, float32. `names` belong to the base model's files.

    Raises ModelFolderError when a matrix is not one tensor of those files.
    """
    changed = merged_names(adapter, base_model, names)
    return {
        f"{layer}.weight": with_adapter(base[:], adapter[layer + A], adapter[layer + B], config)
        for stored, base in tensor_files.stored(base_model, set(changed))
        for layer in [changed[stored]]
    }


def merged_names(adapter: Iterable[str], base_model: Path, names: Names) -> dict[str, str]:
    """The names in the base model's files of the matrices that an adapter changes → the layers' names in the model.

    `adapter` has the names of its parameters. Raises ModelFolderError when a matrix is not one tensor of those files.
    """
    layers = {f"{layer}.weight": layer for layer in _layers(adapter)}
    if fused := sorted(layers.keys() - set(names.plain.values())):
        raise ModelFolderError(f"{base_model} holds {fused[0]} with others or in parts: trainer.lora cannot be merged")
    return {stored: layers[name] for stored, name in names.plain.items() if name in layers}


def with_adapter(base: Tensor, a: Tensor, b: Tensor, config: AdapterConfig) -> Tensor:
    """A matrix with its adapter merged, float32."""
    return base.float() + (config.alpha / config.rank) * (b.float() @ a.float())


def for_engines(adapter: dict[str, Tensor], base_model: Path) -> dict[str, Tensor]:
    """The adapter, plus a zero adapter for each layer that engines fuse with an adapted one."""
    beside: dict[str, Tensor] = {}
    for layer in _layers(adapter):
        parent, _, last = layer.rpartition(".")
        for name in next((group for group in COMPUTED_TOGETHER if last in group), ()):
            beside.setdefault(f"{parent}.{name}", adapter[layer + A])
    absent = {f"{layer}.weight": a for layer, a in beside.items() if layer + A not in adapter}
    zeros = {}
    for name, base in tensor_files.stored(base_model, set(absent)):
        layer, a = name.removesuffix(".weight"), absent[name]
        zeros[layer + A] = torch.zeros_like(a)
        zeros[layer + B] = torch.zeros(base.get_shape()[0], len(a), dtype=a.dtype)
    return adapter | zeros


def stored(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by peft's names in files."""
    return {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in adapter.items()}


def write(
    folder: Path, adapter: dict[str, Tensor], base_model: Path, config: AdapterConfig, head: str | None = None
) -> None:
    """Write the adapter so that `peft.PeftModel.from_pretrained` reads it. `head` names a classifier's new head."""
    names = sorted({layer.rpartition(".")[2] for layer in _layers(adapter)})
    with atomic_folder(folder) as draft:
        peft_config = _peft_config(config, names)
        if head:
            peft_config.task_type, peft_config.modules_to_save = "SEQ_CLS", [head]
        peft_config.base_model_name_or_path = str(base_model)
        peft_config.inference_mode = True
        peft_config.save_pretrained(str(draft))
        save_file(stored(adapter), draft / ADAPTER, metadata={"format": "pt"})


def _peft_config(config: AdapterConfig, targets: list[str]) -> peft.LoraConfig:
    """Without dropout, so that recomputed logprobs are those of the policy that sampled."""
    import peft

    return peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def _all_linear(lm: Any) -> list[str]:
    """The last names of all linear layers, except the output head."""
    from transformers.pytorch_utils import Conv1D

    head = lm.get_output_embeddings()
    linear = (name for name, m in lm.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def _linear_layers(lm: Any, target: str) -> list[str]:
    """The linear layers of a name, except the output head, which is applied without its module."""
    return [
        name
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear)
        and f".{name}".endswith(f".{target}")
        and module is not lm.get_output_embeddings()
    ]


def _layers(adapter: Iterable[str]) -> Iterator[str]:
    return (name.removesuffix(A) for name in adapter if name.endswith(A))
