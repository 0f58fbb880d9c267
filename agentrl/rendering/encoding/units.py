"""Encodes text by cached units, since most words of a new text have been encoded before.

Byte-level BPE tokenizers of the GPT kind split a text into words before merging, and always before a space that follows
a non-space character. The ids of a text are therefore the concatenated ids of its *units*, the parts between such
splits:

    The answer  is 47.\\n  Next   →   "The" " answer  is" " 47.\\n  Next"

Each alternative of their patterns (`_ALTERNATIVES`) matches a space only as its first character or after other white
space. No alternative looks back, and none looks ahead past the end of white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise, repeat
from typing import Any

from tokenizers import Tokenizer, models

from agentrl.rendering.encoding.bytelevel import TokenBytes, token_bytes

Encode = Callable[[str], list[int]]

CERTAIN = re.compile(r"[!-~\w]")
"""Characters that are no white space in any version of Unicode."""
CUT = re.compile(f" (?<={CERTAIN.pattern} )")
"""The space that a unit begins with."""
UNIT_CHARS, UNITS, OPENINGS = 64, 50_000, 1024
"""Limits of the caches: characters of a unit, number of units, number of beginnings of texts."""
TOGETHER = 4096
"""Maximum number of new units that are encoded in one call of the tokenizer."""

_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_ALTERNATIVES = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS),
    *(r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"),
    *(r" ?\p{L}+", _BEFORE + r"\p{L}+", _BEFORE + r"[\p{L}\p{M}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
    *(f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*"),
    *(f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?", f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
    *_SPACES,
)
_ALTERNATIVE = f"(?:{'|'.join(map(re.escape, _ALTERNATIVES))})"
_PATTERN = re.compile(rf"{_ALTERNATIVE}(?:\|{_ALTERNATIVE})*")
_NORMALIZERS = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
"""Normalizers that change nothing or compose characters; no composition contains a space."""

PROBES = (
    "user\nWhat's 12 plus  35?\n\nIt's 47 , I'D say .\n",
    " def f(x):\r\n    return {'a': [1, 2.5]}\t# é ü e\u0301 日本 語",
    "a\u00a0 b\u2003c \u200b d\u0085 e 🙂 f ...  <|im_end|> x </think> y  \n \n z ",
)


def units_encode(tokenizer: Tokenizer) -> Encode:
    """A function that returns `tokenizer.encode(text, add_special_tokens=False).ids`, by units if that is equal.

    The tokenizer must not be changed afterwards.
    """

    def plain(text: str) -> list[int]:  # not in a batch: a batch, even of one text, goes to other threads
        return tokenizer.encode(text, add_special_tokens=False).ids

    table = token_bytes(tokenizer)
    if table is None or not cuts_into_units(tokenizer):
        return plain
    by_units = UnitEncoder(plain, table)
    return by_units if all(by_units(probe) == plain(probe) for probe in PROBES) else plain


class UnitEncoder:
    """Encodes texts by units, for a tokenizer that `cuts_into_units`."""

    def __init__(self, plain: Encode, table: TokenBytes, capacity: int = UNITS) -> None:
        """`plain` encodes any text; `capacity` limits the number of cached units."""
        self._plain = plain
        self._table = table
        self._capacity = capacity
        self._known: dict[str, tuple[int, ...]] = {}  # by the unit without the space that it begins with
        self._words: dict[str, tuple[int, ...]] = {}  # the known units after which every space is a cut
        self._opening = lru_cache(OPENINGS)(plain)

    def __call__(self, text: str) -> list[int]:
        """The ids of a text."""
        first, *words = text.split(" ")
        by_word = list(map(self._words.get, words, repeat(())))
        if first and CERTAIN.match(first[-1]) and all(by_word):
            return [*self._begin(first), *chain.from_iterable(by_word)]
        first, *units = CUT.split(text)
        found = list(map(self._known.get, units, repeat(())))
        if not all(found):
            new = self._learn([unit for unit, ids in zip(units, found, strict=True) if not ids])
            found = [ids or new[unit] for unit, ids in zip(units, found, strict=True)]
        return [*self._begin(first), *chain.from_iterable(found)]

    def _begin(self, first: str) -> list[int]:
        """The ids of the first part of a text, which does not begin at a cut."""
        return self._opening(first) if len(first) <= UNIT_CHARS else self._plain(first)

    def _learn(self, units: list[str]) -> dict[str, tuple[int, ...]]:
        """The ids of new units, the last of which may end in white space."""
        ascii_units = [unit for unit in dict.fromkeys(units) if unit.isascii()]
        new: dict[str, tuple[int, ...]] = {}
        for start in range(0, len(ascii_units), TOGETHER):  # a thread that encodes much lets others run between
            new |= self._together(ascii_units[start : start + TOGETHER])
        for unit in units:
            if unit not in new:
                new[unit] = tuple(self._plain(f" {unit}"))
        for unit, ids in new.items():
            if len(unit) <= UNIT_CHARS:
                self._remember(unit, ids)
        return new

    def _together(self, units: list[str]) -> dict[str, tuple[int, ...]]:
        """The ids of ASCII units that are encoded in one call. The byte lengths of the ids show where each unit ends.

        Empty if the lengths do not match: a vocabulary may lack characters, which are then lost.
        """
        joined = "".join([f" {unit}" for unit in units])
        ids = self._plain(joined)
        ends = list(accumulate(self._table.lengths(ids), initial=0))  # ends[i]: chars of i ids
        places = {end: i for i, end in enumerate(ends)}
        bounds = list(accumulate([len(unit) + 1 for unit in units], initial=0))
        if ends[-1] != bounds[-1] or not places.keys() >= set(bounds):
            return {}
        return {unit: tuple(ids[places[a] : places[b]]) for unit, (a, b) in zip(units, pairwise(bounds), strict=True)}

    def _remember(self, unit: str, ids: tuple[int, ...]) -> None:
        if len(self._known) >= self._capacity:
            for oldest in list(islice(self._known, (self._capacity + 1) // 2)):
                self._known.pop(oldest, None)
                self._words.pop(oldest, None)
        self._known[unit] = ids
        if " " not in unit and CERTAIN.match(unit[-1:]):
            self._words[unit] = ids


def cuts_into_units(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer encodes each unit independently of the others.

    No merged or added token may cross a cut or depend on the text next to it.
    """
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.dropout or tokenizer.truncation or tokenizer.padding:
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        if " " in token.content or token.lstrip or token.rstrip or token.single_word:
            return False
    parts = Tokenizer(models.BPE())  # without the vocabulary, which takes long to write
    parts.normalizer, parts.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    written = json.loads(parts.to_str())
    return written["normalizer"] in _NORMALIZERS and _cuts(written["pre_tokenizer"])


def _cuts(pre_tokenizer: Any) -> bool:
    """Whether all stages of a pre-tokenizer are known, the last one is byte-level, and one stage matches all spaces."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*stages, last]}:
            pass
        case _:
            stages, last = [], pre_tokenizer
    match last:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(finds_words)}:
            patterns = [_pattern(stage) for stage in stages]
            known = all(pattern == "" or _PATTERN.fullmatch(pattern) for pattern in patterns)
            return known and (finds_words or any(pattern.endswith(_SPACES[-1]) for pattern in patterns))
    return False


def _pattern(stage: Any) -> str:
    """The regular expression at which a stage splits; "" for digits; "?", an unknown pattern, for any other stage."""
    match stage:
        case {"type": "Digits"}:
            return ""
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
            return pattern
    return "?"
