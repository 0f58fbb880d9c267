"""The critic of PPO: a model of values.

The critic is a separate model with the policy's layout: the base model's body, the same number of trained layers, the
same sharding, and a linear head that starts at 0; or body and head of a reward model. A value belongs to the state that
a token is sampled from, that is, to all tokens before it. Samples that share those tokens share the value but have
their own targets. H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.configs.algorithm import Algorithm
from agentrl.errors import ModelFolderError
from agentrl.trainer.algorithms.advantages import Totals, alone
from agentrl.trainer.models import rank_parts
from agentrl.trainer.models.loading import given, some, stored_name
from agentrl.trainer.models.policy import Body, decoder
from agentrl.trainer.models.tensor_files import files_of
from agentrl.trainer.packing import Microbatch, Sample

HEAD = {"score.weight": "weight", "score.bias": "bias"}
"""Names in a classifier's files of the tensors of the head."""


class Critic(Body):
    """The body of a causal LM, and a value head. Its forward is the FSDP root."""

    def __init__(self, lm: Any) -> None:
        super().__init__(decoder(lm))
        self.prefix = next(name for name, module in lm.named_modules() if module is self.lm)
        self.value = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, batch: Microbatch) -> Tensor:
        """(P,) float32, the value of the state before each predicted token."""
        self.count(batch, 0)
        return self.scalars(batch, self.value)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters of body and head by their names, in a fixed order."""
        yield from super().trainable()
        for name, parameter in self.value.named_parameters():
            yield f"value.{name}", parameter

    def begin_as(self, folder: Path) -> None:
        """Copy body and head of a reward model, a folder that `agentrl reward-model` wrote. A head without a bias
        leaves it at 0; adapters stay as they are. Raises ModelFolderError when the folder is not such a model, or a
        tensor of it has another shape.
        """
        what, files = f"trainer.critic_from: {folder}", files_of(folder)
        body = {f"{self.prefix}.{stored_name(n)}": p for n, p in self.lm.named_parameters() if ".lora_" not in n}
        head = {stored: getattr(self.value, of) for stored, of in HEAD.items() if stored in files}
        if "score.weight" not in head:
            raise ModelFolderError(f"{what} has no score.weight, the head of a model of `agentrl reward-model`")
        plain = {stored: name for stored, name in self.names.plain.items() if name in body and stored in files}
        fused = [one for one in self.names.fused if one.names <= files.keys()]
        names = replace(self.names, plain=plain, fused=fused)
        missing = body.keys() - given(names, files)
        foreign = files.keys() - self.names.plain.keys() - head.keys() - {n for one in fused for n in one.names}
        wrong = [f"{has} {some(sorted(of))}" for has, of in (("lacks", missing), ("also has", foreign)) if of]
        if wrong:
            raise ModelFolderError(f"{what} has another architecture than the run's model: it {' and '.join(wrong)}")
        rank_parts.read(files, replace(names, plain=plain | {stored: stored for stored in head}), body | head, what)


@dataclass(frozen=True, slots=True)
class Learner:
    """A critic and its optimizer."""

    critic: Critic
    optimizer: torch.optim.Optimizer


def explained_variance(samples: Sequence[Sample], algorithm: Algorithm, totals: Totals = alone) -> float:
    """1 − Var(target − value) / Var(target) over a batch's loss tokens, or the first ones of its turns where those have
    values: 1 is perfect, 0 or less is useless. Collective if `totals` is.
    """
    pairs = []
    for s in samples:
        if s.targets is not None and s.values is not None:
            of = s.tokens.loss_mask
            target, value = s.targets[of].astype(np.float64), s.values[of]
            if algorithm.advantage_level == "turn":
                first = np.diff(s.tokens.turn_ids[of], prepend=-1) != 0
                target, value = target[first], value[first]
            pairs.append((target, target - value))
    sums = totals(
        {
            "n": float(sum(len(target) for target, _ in pairs)),
            "target": sum(float(target.sum()) for target, _ in pairs),
            "error": sum(float(error.sum()) for _, error in pairs),
        }
    )
    n = max(1.0, sums["n"])
    squares = totals(
        {
            "target": sum(float(((target - sums["target"] / n) ** 2).sum()) for target, _ in pairs),
            "error": sum(float(((error - sums["error"] / n) ** 2).sum()) for _, error in pairs),
        }
    )
    return 1 - squares["error"] / squares["target"] if squares["target"] else 0.0
