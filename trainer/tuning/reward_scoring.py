"""Scores conversations with a trained reward model, as its training did: the ids of the proxy, read at the last token.

B: sequences, T: tokens of the longest, padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.domain.schemas import Json
from agentrl.errors import ModelFolderError, UserError
from agentrl.rendering import load_renderer
from agentrl.rendering.messages import role_of
from agentrl.trainer.tuning.encoding import encode


class RewardScorer:
    """A reward model and its renderer."""

    def __init__(self, folder: Path, device: str = "auto", dtype: str = "float32") -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if not str((config.architectures or [""])[0]).endswith("ForSequenceClassification") or config.num_labels != 1:
            raise ModelFolderError(f"{folder} is not a reward model: `agentrl reward-model` writes one")
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = torch.device(chosen)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, dtype=getattr(torch, dtype)
        )
        self.model = model.to(self.device).eval()
        self.renderer = load_renderer(folder)
        self.longest = self.renderer.max_context

    def encode(self, messages: list[Json], tools: list[Json] | None = None) -> list[int]:
        """The ids of a conversation up to the end token of its last message. Raises UserError."""
        if not messages or role_of(messages[-1]) != "assistant":
            raise UserError("messages: the last message must be the assistant's")
        sample = encode(self.renderer, messages, tools, first=len(messages) - 1)[-1]
        ids: list[int] = sample.tokens.input_ids.tolist()
        if self.longest is not None and len(ids) > self.longest:
            raise UserError(f"messages: {len(ids)} tokens are more than the model's context of {self.longest}")
        return ids

    @torch.inference_mode()
    def rewards(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The reward of each sequence."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        ids_BT = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
        for row, ids in enumerate(sequences):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT = (torch.arange(ids_BT.shape[1])[None] < lengths[:, None]).long()
        body = self.model.base_model
        hidden_BTH: Tensor = body(
            input_ids=ids_BT.to(self.device), attention_mask=mask_BT.to(self.device)
        ).last_hidden_state
        last_BH = hidden_BTH[torch.arange(len(sequences)), lengths - 1]
        found: list[float] = self.model.score(last_BH).squeeze(-1).float().tolist()
        return found
