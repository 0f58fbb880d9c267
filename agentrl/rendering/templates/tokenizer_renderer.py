"""The base class of renderers over a tokenizer: sizes, raw text, and a parser without markup."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from agentrl.rendering.encoding.longest import longest_text
from agentrl.rendering.encoding.text_decoding import TextParser, decode
from agentrl.rendering.renderer import OutputParser


class TokenizerRenderer:
    """Base class of renderers. A subclass renders, bridges and parses."""

    def __init__(
        self, tokenizer: Tokenizer, stop_token_ids: list[int], vocab_size: int | None, max_context: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.vocab_size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_context = max_context
        self.max_chars = longest_text(tokenizer, max_context)

    def text_parser(self) -> OutputParser:
        """A parser without markup."""
        return TextParser(self._tokenizer, self.stop_token_ids)

    def encode(self, text: str) -> list[int]:
        """Encode a raw prompt with the tokenizer's prefix; special tokens in it are recognised."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        return decode(self._tokenizer, ids)
