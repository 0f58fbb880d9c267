"""Compares an answer with the expected text: exactly, by similarity, or as the choice of a letter."""

from __future__ import annotations

import difflib
import re
import unicodedata
from typing import Any

from agentrl.rollout.rewards.function_value import Graded

MOST_CHARACTERS = 1_000
"""Longer texts are compared by their ends, since the comparison's cost grows with the square of the length."""
EDGES = " \t\r\n.,;:!?\"'`*()[]{}"


def exact(completion: str, ground_truth: Any, pattern: str | None = None, normalize: bool = True) -> Graded:
    """1 if the answer equals the expected text, or one of a list of texts. `pattern` is a regular expression with a
    group that finds the answer in the text; its last match counts. `normalize` ignores case, white space, and
    punctuation at both ends.
    """
    answer = found(completion, pattern)
    if answer is None:
        return Graded(0.0, None)
    expected = [str(one) for one in (ground_truth if isinstance(ground_truth, list) else [ground_truth])]
    if normalize:
        answer, expected = normalized(answer), list(map(normalized, expected))
    return Graded(float(answer in expected), expected[0] if answer in expected else answer)


def fuzzy(completion: str, ground_truth: Any, pattern: str | None = None, threshold: float = 0.0) -> Graded:
    """The similarity of the answer and the expected text, from 0 to 1 (difflib's ratio of normalised texts); 0 below
    `threshold`.
    """
    answer = found(completion, pattern)
    if answer is None:
        return Graded(0.0, None)
    expected = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    best = max((_ratio(normalized(answer), normalized(str(one))) for one in expected), default=0.0)
    return Graded(best if best >= threshold else 0.0, normalized(answer))


def choice(completion: str, ground_truth: Any, letters: str = "ABCD") -> Graded:
    """1 if the answer chooses the expected letter. `ground_truth` is a letter, or the index of one. The last choice in
    the text counts: `\\boxed{B}`, "answer is B", "(B)", or a line with the letter alone.
    """
    expected = letters[ground_truth] if isinstance(ground_truth, int) else str(ground_truth).strip(EDGES).upper()[:1]
    one = f"[{re.escape(letters)}]"
    forms = (
        rf"\\boxed\{{\s*(?:\\text\{{)?\(?({one})",
        rf"(?:answer|choice|option)\s*(?:is|:)?\s*:?\s*\**\(?({one})\b",
        rf"\(({one})\)",
        rf"^\W*({one})\b(?=\W*$|[.):])",
    )
    for form in forms:
        chosen = re.findall(form, completion[-MOST_CHARACTERS:], re.IGNORECASE | re.MULTILINE)
        if chosen:
            return Graded(float(chosen[-1].upper() == expected), chosen[-1].upper())
    return Graded(0.0, None)


def found(text: str, pattern: str | None) -> str | None:
    """The last match of `pattern`, or of its first group; the whole text without a pattern; None without a match."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0) or ""


def normalized(text: str) -> str:
    """The text in one form of Unicode and of case, with single spaces, without punctuation at its ends."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(EDGES)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one[-MOST_CHARACTERS:], other[-MOST_CHARACTERS:], autojunk=False).ratio()
