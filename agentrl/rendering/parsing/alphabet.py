"""Maps marker tokens to single letters, so that formats can use regular expressions over text and markers.

A marker that is a token of the vocabulary matches only that token; the same characters from other tokens are text. The
letter of a marker is a lone surrogate, which no decoded text contains. A marker that is not in the vocabulary is
matched as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

_FIRST = 0xD800
_LETTER = re.compile("[\ud800-\udbff]")


class Alphabet:
    """The letters of a tokenizer's marker tokens, for one output format."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        """`markers` are the strings that are tokens of their own where the vocabulary has them."""
        known = [(marker, tokenizer.token_to_id(marker)) for marker in dict.fromkeys(markers)]
        found = sorted(((marker, id) for marker, id in known if id is not None), key=lambda pair: -len(pair[0]))
        self.letters = {id: chr(_FIRST + i) for i, (_, id) in enumerate(found)}
        self._by_marker = {marker: self.letters[id] for marker, id in found}
        self._spelled = {ord(letter): marker for marker, letter in self._by_marker.items()}

    def marked(self, text: str) -> str:
        """A format's own text, e.g. a regular expression, with letters for its markers."""
        for marker, letter in self._by_marker.items():
            text = text.replace(marker, letter)
        return text

    def spelled(self, text: str) -> str:
        """Text as a client gets it: markers as they are spelled."""
        return text.translate(self._spelled) if _LETTER.search(text) else text


@lru_cache(maxsize=64)
def alphabet(tokenizer: Tokenizer, markers: tuple[str, ...]) -> Alphabet:
    """The alphabet of a tokenizer and a format's markers, which is made once."""
    return Alphabet(tokenizer, markers)
