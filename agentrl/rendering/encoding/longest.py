"""Bounds the text that fits into a context, so that longer text is rejected without encoding it.

A token of a byte-level vocabulary stands for at most as many characters as it has bytes; with byte fallback, for at
most as many as its text has. A context of n tokens therefore holds at most n times the characters of the longest token.
White space is not counted, since templates strip it.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

from agentrl.rendering.encoding.bytelevel import token_bytes

COMPOSED = 4
"""Maximum number of characters that NFC composes to one."""


def longest_text(tokenizer: Tokenizer, max_context: int | None) -> int | None:
    """Maximum characters, white space not counted, of a text that may fit into a context; None if no bound is known."""
    longest = _chars_per_token(tokenizer)
    return None if max_context is None or longest is None else max_context * longest


def _chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Maximum number of characters of a text that one token stands for; None if there is no bound."""
    table = token_bytes(tokenizer)
    if table is not None:
        longest = table.longest
    elif isinstance(tokenizer.model, models.BPE) and tokenizer.model.byte_fallback:
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    else:  # many unknown characters may be one token
        return None
    shortened = _shortened(tokenizer)
    return None if shortened is None else longest * shortened


def _shortened(tokenizer: Tokenizer) -> int | None:
    """Maximum number of characters that the normalizer replaces by one; None if it may remove any number."""
    alone = Tokenizer(models.BPE())  # without the vocabulary, which takes long to write
    if tokenizer.normalizer is not None:
        alone.normalizer = tokenizer.normalizer
    return _most(json.loads(alone.to_str())["normalizer"])


def _most(normalizer: Any) -> int | None:
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC"}:
            return COMPOSED
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
            return len(pattern)
        case {"type": "Sequence", "normalizers": list(stages)}:
            product = 1
            for stage in stages:
                most = _most(stage)
                if most is None:
                    return None
                product *= most
            return product
    return None
