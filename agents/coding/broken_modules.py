"""Tasks for a coding agent: small modules with one wrong line, and tests that show it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

PROMPT = "The tests of this repository fail. Find the fault in {name}.py and repair it. Do not change the tests."
HELD_OUT = 0.2
"""The share of the faults that training does not show."""

MODULES: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "spans": (
        """def merge(spans):
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
""",
        """from spans import merge

assert merge([]) == []
assert merge([(3, 5), (1, 2)]) == [(1, 2), (3, 5)]
assert merge([(1, 4), (2, 3)]) == [(1, 4)]
assert merge([(1, 2), (2, 3)]) == [(1, 3)]
""",
        (
            ("start <= merged[-1][1]", "start < merged[-1][1]"),
            ("max(merged[-1][1], end)", "end"),
            ("in sorted(spans)", "in spans"),
        ),
    ),
    "words": (
        """def wrap(text, width):
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return lines + [line] if line else lines
""",
        """from words import wrap

assert wrap("", 5) == []
assert wrap("a bb ccc", 4) == ["a bb", "ccc"]
assert wrap("aaaaaaa b", 3) == ["aaaaaaa", "b"]
assert wrap("aa bb", 4) == ["aa", "bb"]
""",
        (
            ("len(line) + 1 + len(word) > width", "len(line) + len(word) > width"),
            ("            line = word\n", '            line = ""\n'),
            ("return lines + [line] if line else lines", "return lines"),
        ),
    ),
    "ledger": (
        """class Ledger:
    def __init__(self):
        self.entries = []

    def add(self, name, cents):
        if cents == 0:
            raise ValueError("an entry of nothing")
        self.entries.append((name, cents))

    def balance(self, name):
        return sum(cents for who, cents in self.entries if who == name)

    def debtors(self):
        return sorted({who for who, _ in self.entries if self.balance(who) < 0})
""",
        """from ledger import Ledger

book = Ledger()
book.add("ann", 5)
book.add("bob", -7)
book.add("ann", -2)
assert book.balance("ann") == 3
assert book.balance("eve") == 0
assert book.debtors() == ["bob"]
try:
    book.add("ann", 0)
except ValueError:
    pass
else:
    raise AssertionError("an entry of 0 was accepted")
""",
        (
            ("if cents == 0", "if cents < 0"),
            (" if who == name)", ")"),
            ("self.balance(who) < 0", "self.balance(who) <= 3"),
        ),
    ),
    "roman": (
        """VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def number(text):
    total = 0
    for letter, following in zip(text, text[1:] + " "):
        value = VALUES[letter]
        total += -value if value < VALUES.get(following, 0) else value
    return total
""",
        """from roman import number

assert number("III") == 3
assert number("IX") == 9
assert number("MCMXCIV") == 1994
assert number("LVIII") == 58
""",
        (
            ('"L": 50', '"L": 40'),
            ("value < VALUES.get", "value <= VALUES.get"),
            ('text[1:] + " "', "text[1:]"),
        ),
    ),
}


def tasks() -> list[dict[str, Any]]:
    """Every fault of every module, as a task."""
    found = []
    for name, (source, tests, faults) in MODULES.items():
        for right, wrong in faults:
            files = {f"{name}.py": source.replace(right, wrong), f"test_{name}.py": tests}
            prompt = PROMPT.format(name=name)
            found.append({"prompt": prompt, "files": files, "tests": {f"test_{name}.py": tests}})
    return found


def train_tasks(seed: int = 0, count: int = 1024) -> Iterator[dict[str, Any]]:
    """`count` random tasks that are not held out."""
    _, known = _split()
    return iter(random.Random(f"train-{seed}").choices(known, k=count))


def heldout_tasks() -> list[dict[str, Any]]:
    """The tasks that training does not show."""
    return _split()[0]


def _split() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shuffled = tasks()
    random.Random("held out").shuffle(shuffled)
    held_out = round(HELD_OUT * len(shuffled))
    return shuffled[:held_out], shuffled[held_out:]
