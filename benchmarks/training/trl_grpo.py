"""Runs TRL's GRPO trainer on given trajectories: its tensors, forward pass, loss and optimizer, without sampling.

TRL samples a batch, pads it to one rectangle (prompts on the left, outputs on the right), recomputes its logprobs and
cuts it into microbatches of rows. This module builds that rectangle, and then does the same as `_prepare_inputs`,
`compute_loss` and `Trainer`'s inner loop. TRL's GRPO has no packing. The variant `trl_tuned` uses our allocator
settings and our matrix products. `.venv-trl` holds the packages that TRL needs in addition to `.venv`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.trainer.distributed import keep_freed_memory
from agentrl.trainer.models import onednn
from agentrl.trainer.packing import Sample

from .batches import rows_within, split
from .variants import Setting

PACKAGES = Path(__file__).parents[2] / ".venv-trl"
PAD, START, END = range(3)
TEMPERATURE = 1.0


def is_available() -> bool:
    """Whether TRL's trainer can be imported; adds `.venv-trl` to the path if it exists."""
    for folder in (PACKAGES / "lib").glob("python*/site-packages"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets", "pandas"))


class TRL:
    """One trainer of TRL. A step does the same as `Trainer.train` between two samplings."""

    def __init__(self, setting: Setting, samples: list[Sample], device: torch.device, *, tuned: bool = False) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        self._setting = setting
        self._device = device
        self._folder = TemporaryDirectory()
        per_minibatch = len(samples) // setting.minibatches
        self._rows = rows_within(per_minibatch, _width(samples), setting.budget)
        c = setting.trainer
        self._args: dict[str, Any] = {
            "per_device_train_batch_size": self._rows,
            "gradient_accumulation_steps": per_minibatch // self._rows,
            "steps_per_generation": len(samples) // self._rows,
            "num_generations": setting.group_size,
            "loss_type": "grpo",
            "beta": 0.0,
            "epsilon": c.algorithm.clip_low,
            "temperature": TEMPERATURE,
            "learning_rate": c.lr,
            "adam_beta1": c.betas[0],
            "adam_beta2": c.betas[1],
            "weight_decay": c.weight_decay,
            "max_grad_norm": c.grad_clip,
            "optim": "adamw_torch_fused",
            "gradient_checkpointing": False,
            "bf16": setting.bfloat16,
            "use_cpu": device.type == "cpu",
        }
        model: Any = AutoModelForCausalLM.from_pretrained(
            setting.model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        if tuned:
            keep_freed_memory()
            onednn.adopt(model)
        self._trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=_no_reward,
            args=GRPOConfig(output_dir=self._folder.name, report_to="none", **self._args),
            train_dataset=Dataset.from_list([{"prompt": ""}] * len(samples)),
            processing_class=_tokenizer(model.config.vocab_size),
        )
        self.model: nn.Module = self._trainer.model
        self.model.train()  # the models measured have no dropout
        self._trainer.current_gradient_accumulation_steps = self._args["gradient_accumulation_steps"]
        self.optimizer: torch.optim.Optimizer = (
            setting.make_optimizer(list(self.model.parameters()))
            if setting.make_optimizer
            else self._trainer.create_optimizer()
        )

    def update(self, samples: list[Sample]) -> float:
        """See Variant."""
        parts = split(samples, self._setting.minibatches, self._setting.budget)
        batch = rectangle([s for part in parts for s in part], self._device)
        with torch.no_grad():
            batch["old_per_token_logps"], *_ = self._trainer._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
                batch["completion_ids"].shape[1],
                batch_size=self._rows,
            )
        loss_sum, start = 0.0, 0
        for part in parts:
            end = start + len(part)
            for first in range(start, end, self._rows):
                rows = slice(first, min(first + self._rows, end))  # a warm-up may have fewer
                loss = self._trainer.compute_loss(self.model, {name: t[rows] for name, t in batch.items()})
                loss.backward()
                loss_sum += float(loss.detach())
            start = end
            nn.utils.clip_grad_norm_(self.model.parameters(), self._args["max_grad_norm"])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss_sum / len(parts)

    def weights(self) -> dict[str, Tensor]:
        """See Variant."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def settings(self) -> dict[str, object]:
        """See Variant."""
        return self._args | {"attention": "sdpa", "head": "fused, in chunks (TRL's own)", "packing": "none in its GRPO"}


def rectangle(samples: list[Sample], device: torch.device) -> dict[str, Tensor]:
    """(B, P) prompts padded on the left, (B, C) outputs padded on the right, as TRL keeps a sampled batch."""
    starts = [int(np.argmax(s.tokens.loss_mask)) for s in samples]
    widest = max(starts), max(len(s.tokens.input_ids) - n for s, n in zip(samples, starts, strict=True))
    prompts, outputs = (np.full((len(samples), width), PAD, np.int64) for width in widest)
    prompt_mask, output_mask = np.zeros_like(prompts), np.zeros_like(outputs)
    for row, (sample, n) in enumerate(zip(samples, starts, strict=True)):
        ids = sample.tokens.input_ids
        prompts[row, widest[0] - n :] = ids[:n]
        prompt_mask[row, widest[0] - n :] = 1
        outputs[row, : len(ids) - n] = ids[n:]
        output_mask[row, : len(ids) - n] = 1
    arrays = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": outputs,
        "completion_mask": output_mask,
        "advantages": np.array([s.advantages[n] for s, n in zip(samples, starts, strict=True)], np.float32),
    }
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _width(samples: list[Sample]) -> int:
    batch = rectangle(samples, torch.device("cpu"))
    return batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer(vocabulary: int) -> Any:
    """Required by the constructor; nothing is tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token=str(START)))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=str(PAD), eos_token=str(END))
