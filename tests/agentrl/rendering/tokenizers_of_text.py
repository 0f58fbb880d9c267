"""Tokenizers with the pre-tokenizers that models ship, and texts that are hard to cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from .conftest import CHATML_TOKENS, byte_tokenizer
from .qwen_vocabulary import PATTERN as QWEN2
from .qwen_vocabulary import qwen_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_REST}"
O200K = "|".join(rf"{letters}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for letters in _CASED) + r"|\p{N}{1,3}" + _REST
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def splits(*patterns: str, behavior: str = "isolated", invert: bool = False) -> PreTokenizer:
    """Words by regular expressions, then bytes."""
    stages = [Split(Regex(pattern), behavior, invert) for pattern in patterns]
    return Sequence([*stages, ByteLevel(add_prefix_space=False, use_regex=False)])


KNOWN: dict[str, PreTokenizer] = {
    "gpt2": ByteLevel(add_prefix_space=False),
    "gpt2 as a pattern": splits(GPT2),
    "smollm2": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "numbers": Sequence([Digits(individual_digits=False), ByteLevel(add_prefix_space=False)]),
    "qwen2": splits(QWEN2),
    "qwen2, what matches is kept": splits(QWEN2, behavior="removed", invert=True),
    "qwen3.5": splits(QWEN3_5),
    "llama-3": splits(LLAMA3),
    "o200k": splits(O200K),
    "tekken": splits(TEKKEN),
    "deepseek": splits(*DEEPSEEK),
}


def tokenizer_with(pre_tokenizer: PreTokenizer) -> Tokenizer:
    """A small vocabulary behind a pre-tokenizer."""
    tokenizer = byte_tokenizer(*CHATML_TOKENS, markers=("<think>", "\n\n"))
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


@cache
def real_tokenizer(name: str) -> Tokenizer:
    """SmolLM2's where it has been built, or Qwen's where its package is installed."""
    if name == "qwen":
        return qwen_tokenizer()
    path = Path.home() / ".cache" / "agentrl" / "models" / "smollm2" / "tokenizer.json"
    if not path.exists():
        pytest.skip("SmolLM2 has not been built here")
    return Tokenizer.from_file(str(path))


REAL = ["smollm2", "qwen"]

_HARD = [
    *("word", "I", "don't", "I'LL", "'s", "'", "_", "x1", "12", "3456", "²", "½", ".", "...", "(x)", "=", "/", "\\"),
    *(" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u2003", "\u200b", "\u3000"),
    *("é", "e\u0301", "\u0301", "한", "\u1112\u1161", "日本", "ǅ", "ʰ", "🙂", "\x00", "\x04", "\ufffd", "\u212b"),
    *("<|im_end|>", "<|im_start|>user\n", "<think>", "<|im", "x" * 70),
]
hard_texts = st.lists(st.one_of(st.sampled_from(_HARD), st.text(max_size=3)), max_size=12).map("".join)

NFC = normalizers.NFC()
