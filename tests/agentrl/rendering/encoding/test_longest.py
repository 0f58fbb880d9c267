"""No text that fits is refused by its length: tokenizers against the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agentrl.rendering.encoding.bytelevel import _BYTES
from agentrl.rendering.encoding.longest import longest_text

LETTERS = sorted(_BYTES)


def byte_level(normalizer=None, extra=()):
    vocabulary = {letter: i for i, letter in enumerate([*LETTERS, "aa", "aaaa", "Ġa"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "aa"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in extra])
    return tokenizer


def falls_back():
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"▁": 256, "a": 257, "aa": 258, "▁aa": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("▁", "aa")], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KNOWN = [byte_level(), byte_level(normalizers.NFC()), byte_level(extra=["<|im_start|>", "</s>"]), falls_back()]
texts = st.text(st.sampled_from("aab é日🙂\n") | st.characters(exclude_categories=["Cs"]), max_size=60)


@given(texts | st.lists(st.sampled_from(["<|im_start|>", "</s>", "a", "e\u0301", "\u1109\u1161\u11bc"])).map("".join))
@pytest.mark.parametrize("tokenizer", KNOWN)
def test_a_text_that_fits_is_not_too_long(tokenizer, text):
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    most = longest_text(tokenizer, tokens)
    assert most is not None
    assert len("".join(text.split())) <= most


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalizers.StripAccents()),  # may leave out any number of characters
        byte_level(normalizers.Replace("a", "")),
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),  # a word of any length is one token
    ],
)
def test_a_tokenizer_that_may_drop_or_join_any_text_has_no_bound(tokenizer):
    assert longest_text(tokenizer, 100) is None


def test_a_context_of_any_length_holds_any_text():
    assert longest_text(byte_level(), None) is None
