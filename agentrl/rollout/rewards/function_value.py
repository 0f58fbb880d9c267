"""Reads what a reward function returns: a number, named numbers, or nothing; a list of them for a batch. A function may
also return the answer that it has read in the text, and numbers about its judgement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from agentrl.domain.answer_text import bounded
from agentrl.errors import UserError

Value = float | dict[str, float] | None
SCORE = "score"
ANSWERS = ("answer", "pred")
"""Keys of the answer beside `score`: ours, and verl's."""
NOT_FOUND = ""
"""The answer of a text in which the function has found none."""
MOST_NAMES, LONGEST_NAME = 64, 35
"""With the component's name, a name has at most the 100 characters that the proxy accepts."""


class BadValue(UserError):
    """The function returned no finite number."""


class Graded(float):
    """A value, with the answer that the function has read in the text; None: it has found none."""

    answer: str | None

    def __new__(cls, value: float, answer: str | None) -> Graded:
        """Make one."""
        made = super().__new__(cls, value)
        made.answer = answer
        return made


class Judgement(float):
    """A value, with numbers about how it was found, by name."""

    stats: Mapping[str, float]

    def __new__(cls, value: float, stats: Mapping[str, float]) -> Judgement:
        """Make one."""
        made = super().__new__(cls, value)
        made.stats = stats
        return made


def stats_in(result: object) -> dict[str, float]:
    """The numbers about a judgement; empty for a function that gives none."""
    return dict(result.stats) if isinstance(result, Judgement) else {}


def answer_in(result: object) -> str | None:
    """The answer that a function has read, as it is stored; NOT_FOUND if there is none in the text. None if the
    function reads no answers.
    """
    if isinstance(result, Graded):
        return bounded(result.answer) or NOT_FOUND
    if isinstance(result, Mapping) and SCORE in result:
        found = [result[key] for key in ANSWERS if key in result]
        return None if not found else NOT_FOUND if found[0] is None else bounded(str(found[0])) or NOT_FOUND
    return None


def value_of(result: object) -> Value:
    """One answer's value. A mapping with `score` (verl's) has the value of `score`; the values of another mapping are
    named rewards. None means that the function does not judge this answer. Raises BadValue.
    """
    if result is None:
        return None
    if isinstance(result, Mapping):
        if SCORE in result:
            return _finite(result[SCORE])
        if not 0 < len(result) <= MOST_NAMES or not all(map(_is_name, result)):
            raise BadValue(
                f"returned a mapping of {len(result)} items; 1 to {MOST_NAMES} numbers are possible, with names of at "
                f"most {LONGEST_NAME} characters"
            )
        return {name: _finite(value) for name, value in result.items()}
    return _finite(result)


def listed_of_batch(result: object, count: int) -> list[object]:
    """The values that a function returned, one for each of the `count` answers of a batch. Raises BadValue."""
    tolist = getattr(result, "tolist", None)  # an array or a tensor
    listed = tolist() if callable(tolist) else result
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != count:
        got = f"{len(listed)} values" if isinstance(listed, Sequence) and not isinstance(listed, str) else repr(result)
        raise BadValue(f"returned {got[:100]} for a batch of {count} answers")
    return list(listed)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME


def _finite(value: object) -> float:
    if isinstance(value, (str, bytes)):
        raise BadValue(f"returned {value[:100]!r}, not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise BadValue(f"returned {type(value).__name__} {str(value)[:100]!r}, not a number") from None
    if not math.isfinite(number):
        raise BadValue(f"returned {number}")
    return number
