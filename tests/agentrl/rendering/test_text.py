"""Incremental decoding: pieces add up to the text of all ids, whatever the decoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.rendering.text import TextDecoder

from .conftest import byte_tokenizer, patient


def word_tokenizer() -> Tokenizer:
    """Words with a mark in place of the space before them, which the first word loses: what it is depends on its
    place."""
    words = ["▁a", "▁be", "c", "▁", "!", "▁日本"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_tokenizer("<|end|>"), word_tokenizer()], ids=["bytes", "words"])
@patient
@given(data=st.data())
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size(with_added_tokens=True) - 1), max_size=12))
    decoder = TextDecoder(tokenizer)
    pieces = [decoder.push(token) for token in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) + decoder.flush() == whole
    assert whole.startswith("".join(pieces))
