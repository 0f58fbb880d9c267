"""Units: a text encoded unit by unit has the ids that the tokenizer gives the whole text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from tokenizers import AddedToken, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence

from agentrl.rendering.encoding.bytelevel import token_bytes
from agentrl.rendering.encoding.units import CUT, UNIT_CHARS, UnitEncoder, cuts_into_units, units_encode

from ..conftest import patient
from ..tokenizers_of_text import GPT2, KNOWN, NFC, QWEN2, REAL, hard_texts, real_tokenizer, splits, tokenizer_with


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def words(pre_tokenizer: PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_cuts_are_before_spaces_behind_anything_but_white_space() -> None:
    first, *units = CUT.split("The answer  is 47.\n  Next: é +\u0301 ü\xa0 x ")
    assert [first, *(f" {unit}" for unit in units)] == [
        *("The", " answer", "  is", " 47.\n  Next:", " é", " +\u0301 ü\xa0 x", " ")
    ]


@pytest.mark.parametrize("pre_tokenizer", KNOWN.values(), ids=KNOWN)
@patient
@given(text=hard_texts)
def test_the_words_of_a_text_are_those_of_its_units(pre_tokenizer: PreTokenizer, text: str) -> None:
    first, *units = CUT.split(text)
    parts = [first, *(f" {unit}" for unit in units)]
    assert [word for part in parts for word in words(pre_tokenizer, part)] == words(pre_tokenizer, text)


ENCODERS = {name: units_encode(tokenizer_with(pre_tokenizer)) for name, pre_tokenizer in KNOWN.items()}


@pytest.mark.parametrize("name", KNOWN)
@patient
@given(text=hard_texts)
def test_any_text_is_encoded_as_the_tokenizer_does(name: str, text: str) -> None:
    tokenizer, encode = tokenizer_with(KNOWN[name]), ENCODERS[name]
    assert isinstance(encode, UnitEncoder)
    assert encode(text) == plain(tokenizer, text)


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest) -> Tokenizer:
    return real_tokenizer(request.param)


@pytest.fixture(scope="module")
def real_encode(real: Tokenizer) -> Callable[[str], list[int]]:
    encode = units_encode(real)
    assert isinstance(encode, UnitEncoder)
    return encode


@patient
@given(text=hard_texts)
def test_text_is_encoded_as_real_tokenizers_do(
    real: Tokenizer, real_encode: Callable[[str], list[int]], text: str
) -> None:
    expected = plain(real, text)
    assert real_encode(text) == expected
    assert real_encode(text) == expected  # remembered by now
    table = token_bytes(real)
    assert table is not None
    assert UnitEncoder(lambda part: plain(real, part), table)(text) == expected


def test_special_tokens_may_count_as_text() -> None:
    tokenizer = tokenizer_with(KNOWN["gpt2"])
    tokenizer.encode_special_tokens = True
    text = "a <|im_end|> b"
    assert units_encode(tokenizer)(text) == plain(tokenizer, text) != plain(tokenizer_with(KNOWN["gpt2"]), text)


def test_characters_that_the_vocabulary_lacks_are_lost_where_they_are() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abĠ")}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = KNOWN["gpt2"], tokenizer_with(KNOWN["gpt2"]).decoder
    encode = units_encode(tokenizer)
    assert isinstance(encode, UnitEncoder)
    assert encode("a bz z zzab b") == plain(tokenizer, "a bz z zzab b") == [0, 2, 1, 2, 2, 0, 1, 2, 1]


def with_token(content: str, **kind: bool) -> Tokenizer:
    tokenizer = tokenizer_with(KNOWN["gpt2"])
    tokenizer.add_tokens([AddedToken(content, normalized=False, **kind)])
    return tokenizer


def with_parts(**parts: object) -> Tokenizer:
    tokenizer = tokenizer_with(KNOWN["gpt2"])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def cut_short() -> Tokenizer:
    tokenizer = tokenizer_with(KNOWN["gpt2"])
    tokenizer.enable_truncation(4)
    return tokenizer


def padded() -> Tokenizer:
    tokenizer = tokenizer_with(KNOWN["gpt2"])
    tokenizer.enable_padding(length=20)
    return tokenizer


TEXT = "not so long ago, it was 5  o'clock"
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


OTHERS = {
    "token with a space": with_token("so long"),
    "space": with_token(" "),
    "token that takes the space before it": with_token("so", lstrip=True),
    "token that takes the space behind it": with_token("so", rstrip=True),
    "token that is a word": with_token("so", single_word=True),
    "normalizer": with_parts(normalizer=normalizers.Lowercase()),
    "no pre-tokenizer": with_parts(pre_tokenizer=BYTES),
    "prefix space": with_parts(pre_tokenizer=ByteLevel(add_prefix_space=True)),
    "pattern over spaces": with_parts(pre_tokenizer=splits(r"\s?\S+")),
    "pattern that looks for the end": with_parts(pre_tokenizer=splits(GPT2 + r"|\s+$")),
    "pattern without spaces": with_parts(pre_tokenizer=splits(r"\p{N}{1,3}")),
    "pattern that joins": with_parts(pre_tokenizer=splits(QWEN2, behavior="merged_with_next")),
    "unknown stage": with_parts(pre_tokenizer=Sequence([Punctuation(), ByteLevel(add_prefix_space=False)])),
    "stage behind the bytes": with_parts(pre_tokenizer=Sequence([BYTES, Digits()])),
    "cut short": cut_short(),
    "padded": padded(),
}


@pytest.mark.parametrize("tokenizer", OTHERS.values(), ids=OTHERS)
def test_a_tokenizer_that_units_do_not_fit_encodes_whole_texts(tokenizer: Tokenizer) -> None:
    assert not cuts_into_units(tokenizer)
    encode = units_encode(tokenizer)
    assert not isinstance(encode, UnitEncoder)
    assert encode(TEXT) == plain(tokenizer, TEXT)


def test_units_need_a_deterministic_bpe_and_nfc_or_no_normalizer() -> None:
    assert not cuts_into_units(with_parts(model=models.BPE(dropout=0.5)))
    assert not cuts_into_units(with_parts(model=models.WordLevel({"a": 0}, unk_token="a")))
    assert cuts_into_units(with_parts(normalizer=NFC))
    assert cuts_into_units(with_parts(normalizer=normalizers.Sequence([])))


def test_units_are_encoded_once_while_the_cache_has_room() -> None:
    tokenizer, asked = tokenizer_with(KNOWN["gpt2"]), list[str]()

    def encode(text: str) -> list[int]:
        asked.append(text)
        return plain(tokenizer, text)

    table = token_bytes(tokenizer)
    assert table is not None
    units = UnitEncoder(encode, table, capacity=4)
    for text in ("a b c", "a c b b"):
        assert units(text) == plain(tokenizer, text)
    assert asked == [" b c", "a"]
    asked.clear()
    long = "x" * (UNIT_CHARS + 1)
    for _ in range(2):
        assert units(f"{long} {long} c é") == plain(tokenizer, f"{long} {long} c é")
    assert asked == [f" {long}", " é", long, f" {long}", long]
    asked.clear()
    for text in ("a d e", "a c", "a e"):  # the oldest half went
        assert units(text) == plain(tokenizer, text)
    assert asked == [" d e", " c"]
