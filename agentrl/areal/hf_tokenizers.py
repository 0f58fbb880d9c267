"""`load_hf_tokenizer` and `apply_chat_template`, as AReaL has them. Both need transformers (agentrl[trainer])."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentrl.models import resolve_model


@lru_cache(maxsize=8)
def load_hf_tokenizer(name_or_folder: str) -> Any:
    """The tokenizer of a model, by the name or folder that a run's `model` has. A missing padding token becomes the
    end-of-sequence token. Raises UserError for a model that does not exist.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(resolve_model(name_or_folder)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def apply_chat_template(tokenizer: Any, messages: Sequence[Any], *, tokenize: bool = True, **options: Any) -> Any:
    """The token ids of a conversation as a list, or its text with `tokenize=False`."""
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer.encode(rendered, add_special_tokens=False) if tokenize else rendered
