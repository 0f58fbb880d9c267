"""A reward model: a body and a linear head with one output. Exported as a sequence classifier of transformers.

H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.domain.schemas import PROMPT_VERSION
from agentrl.errors import ModelFolderError
from agentrl.files import atomic_folder
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models import lora
from agentrl.trainer.models.loading import stored_name
from agentrl.trainer.models.policy import Body
from agentrl.trainer.packing import Microbatch, Sample
from agentrl.trainer.weights.version_folders import copy_sidecars

BIASED_IN_SGLANG = ("qwen2", "qwen3")
"""Model types whose SGLang classifier has a bias in its head."""


class RewardModel(Body):
    """The body of a causal LM and a new head, equal on every rank. Its forward is the FSDP root.

    Raises ModelFolderError when transformers has no classifier with this body.
    """

    def __init__(self, lm: Any, seed: int = 0) -> None:
        super().__init__(lm.base_model)
        self.classifier = _classifier_of(lm)
        self.prefix = lm.base_model_prefix
        self.score = nn.Linear(lm.config.hidden_size, 1, bias=False)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.score.weight, std=lm.config.initializer_range, generator=generator)

    def forward(self, batch: Microbatch) -> Tensor:
        """(P,) float32, the reward of the tokens before each predicted token."""
        return self.scalars(batch, self.score)

    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by the classifier's names, in a fixed order."""
        for name, parameter in self.lm.named_parameters():
            yield f"{self.prefix}.{name}", parameter
        for name, parameter in self.score.named_parameters():
            yield f"score.{name}", parameter

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained ones of `parameters_by_name`."""
        for name, parameter in self.parameters_by_name():
            if parameter.requires_grad:
                yield name, parameter


def _classifier_of(lm: Any) -> str:
    """The name of transformers' sequence classifier with this body and the head `score`. Raises ModelFolderError."""
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(lm.config), None)
    if found is None or not issubclass(found, GenericForSequenceClassification):
        raise ModelFolderError(f"{type(lm).__name__}: transformers has no sequence classifier with this body")
    return str(found.__name__)


def at_the_end(sample: Sample) -> Sample:
    """The sample with one token appended: its only loss token, whose context is the whole sequence.

    The new token is only predicted, so packing computes no hidden state for it.
    """
    old, n = sample.tokens, len(sample.tokens.input_ids)
    last = np.arange(n + 1) == n
    tokens = dataclasses.replace(
        old,
        input_ids=np.append(old.input_ids, np.int32(0)),
        loss_mask=last,
        logprobs=np.zeros(n + 1, np.float32),
        versions=np.full(n + 1, PROMPT_VERSION, np.int32),
        turn_ids=np.append(old.turn_ids, old.turn_ids.max()),
        temperatures=np.ones(n + 1, np.float32),
    )
    sign = np.sign(sample.advantages[old.loss_mask][0])
    return Sample(tokens, np.where(last, sign, 0).astype(np.float32))


def export(run_dir: Path, model: RewardModel, base_model: Path, adapter: AdapterConfig, world: World) -> None:
    """Write `model/`, a Hugging Face folder of the classifier, in the base model's type. Collective; rank 0 writes.

    A trained adapter is merged, and is also written with the head to `adapter/`. For classifiers that have a bias in
    SGLang and none in transformers, the file holds a bias of zero.
    """
    config: dict[str, Any] = json.loads((base_model / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.parameters_by_name():
        whole = full(parameter)
        if world.leads:
            tensors[name] = whole
    if not world.leads:
        return
    if adapter.rank:
        trained = {name: tensors[name] for name, _ in model.trainable()}
        lora.write(run_dir / "adapter", trained, base_model, adapter, head="score")
        tensors = {stored_name(name): tensor for name, tensor in tensors.items() if ".lora_" not in name}
        tensors |= lora.merged(trained, base_model, model.names, adapter)
    stored = {name: t for name, t in model.names.in_files(tensors).items() if name.startswith(f"{model.prefix}.")}
    tensors = {n: t.to(dtype) for n, t in (stored | {"score.weight": tensors["score.weight"]}).items()}
    if config["model_type"] in BIASED_IN_SGLANG:
        tensors["score.bias"] = torch.zeros(1, dtype=dtype)
    config |= {"architectures": [model.classifier], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    with atomic_folder(run_dir / "model") as draft:
        copy_sidecars(base_model, draft)
        (draft / "config.json").write_text(json.dumps(config, indent=2))
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
