"""A true reward that a reward model learns only in part: overoptimisation.py."""

VOWELS = frozenset("aeiou")
LENGTH = 4


def distinct_vowels(completion: str) -> float:
    """The number of different vowels in an answer, relative to its length, or to 4 if it is shorter: 1 for `ieao`."""
    return len(VOWELS & set(completion)) / max(len(completion), LENGTH)
