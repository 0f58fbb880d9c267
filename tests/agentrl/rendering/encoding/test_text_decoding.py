"""Incremental decoding: pieces add up to the text of all ids, whatever the decoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.rendering.encoding.bytelevel import token_bytes
from agentrl.rendering.encoding.text_decoding import decode, reasoning_tokens, text_decoder

from ..conftest import byte_tokenizer, patient
from ..tokenizers_of_text import REAL, hard_texts, real_tokenizer


def word_tokenizer() -> Tokenizer:
    """Words with a mark in place of the space before them, which the first word loses: what it is depends on its
    place."""
    words = ["▁a", "▁be", "c", "▁", "!", "▁日本"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def odd_tokenizer() -> Tokenizer:
    """Bytes, and added tokens that look like bytes, or like none."""
    tokenizer = byte_tokenizer("<|end|>")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("é", "Ġ日", "a\nb", "日本", "éĠĀ")])
    return tokenizer


TOKENIZERS = {"bytes": byte_tokenizer("<|end|>"), "odd": odd_tokenizer(), "words": word_tokenizer()}


@pytest.fixture(scope="module", params=[*TOKENIZERS, *REAL])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    name: str = request.param
    return TOKENIZERS[name] if name in TOKENIZERS else real_tokenizer(name)


def runs(tokenizer: Tokenizer) -> st.SearchStrategy[list[list[int]]]:
    """Ids: any, of texts, of bytes as they come, and unknown ones."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    kinds = [st.lists(st.integers(0, size + 9), max_size=6), hard_texts.map(lambda text: tokenizer.encode(text).ids)]
    spelled = [tokenizer.token_to_id(letter) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]
    if single := [token for token in spelled if token is not None]:
        kinds.append(st.lists(st.sampled_from(single), max_size=6))
    return st.lists(st.one_of(kinds), max_size=5)


@patient
@given(data=st.data())
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    pieces = data.draw(runs(tokenizer))
    ids = [token for piece in pieces for token in piece]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert decode(tokenizer, ids) == whole
    in_runs, one_by_one = text_decoder(tokenizer), text_decoder(tokenizer)
    texts = [in_runs.push_run(piece) for piece in pieces]
    assert texts == ["".join([one_by_one.push(token) for token in piece]) for piece in pieces]
    assert whole.startswith("".join(texts))
    assert "".join(texts) + in_runs.flush() == whole
    assert in_runs.flush() == ""


@patient
@given(st.binary(max_size=12))
def test_any_bytes_are_decoded_as_the_tokenizer_does(data: bytes) -> None:
    """Invalid UTF-8 becomes the same replacement characters."""
    tokenizer = TOKENIZERS["bytes"]
    table = token_bytes(tokenizer)
    assert table is not None
    by_byte = {table.of([id]): id for id in reversed(range(256))}
    ids = [by_byte[bytes([byte])] for byte in data]
    assert decode(tokenizer, ids) == tokenizer.decode(ids) == data.decode(errors="replace")


def test_a_partial_character_waits_for_its_rest() -> None:
    tokenizer = TOKENIZERS["bytes"]
    euro = tokenizer.encode("€").ids
    decoder = text_decoder(tokenizer)
    assert [decoder.push_run(ids) for ids in (euro[:2], euro[2:] + euro[:1])] == ["", "€"]
    assert decoder.flush() == "\ufffd"
    assert decoder.push_run([*tokenizer.encode("\ufffd").ids]) == "\ufffd"  # a character like any other
    assert decoder.push_run([]) == decoder.flush() == ""


def test_unknown_ids_have_no_bytes() -> None:
    tokenizer = byte_tokenizer()
    table = token_bytes(tokenizer)
    assert table is token_bytes(tokenizer)
    assert table is not None
    assert table.of([10**6, *tokenizer.encode("hi").ids]) == b"hi"


@pytest.mark.parametrize(
    ("output", "reasoning", "count"),
    [
        ("<think>\nhmü\n</think>\n\nhmü", "hmü", 6),  # ü is two tokens
        ("hm</think>so", "hm", 2),  # the prompt has opened it
        ("<think>hm", "hm", 3),  # cut off
        ("hm", None, 0),
        ("<think>so</think>hm", "so hm", 0),  # not in one piece
    ],
)
def test_reasoning_is_counted_up_to_where_its_text_ends(output: str, reasoning: str | None, count: int) -> None:
    tokenizer = byte_tokenizer("<think>", "</think>")
    ids = tokenizer.encode(output, add_special_tokens=False).ids
    assert reasoning_tokens(ids, reasoning, lambda part: decode(tokenizer, part)) == count
