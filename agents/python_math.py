"""Math problems that need a program: a `python` tool, which runs in a sandbox, and tasks with their answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from agentrl import ToolError, tool
from agentrl.sandbox import Limits, run_python

LIMITS = Limits(time_s=5.0, memory_mb=512, processes=16, output_bytes=8_192)
LAST_LINES = 3
"""How many lines of an error the model reads."""
Problem = tuple[str, int]


@tool
async def python(code: str) -> str:
    """Run a Python program, and return what it prints.

    Args:
        code: The program. It has the standard library, and no network.
    """
    done = await run_python(code, limits=LIMITS)
    if done.ended == "time":
        raise ToolError(f"the program ran longer than {LIMITS.time_s:g} s")
    if done.ended == "output":
        raise ToolError(f"the program printed more than {LIMITS.output_bytes:,} bytes")
    if done.status:
        raise ToolError("\n".join(done.stderr.strip().splitlines()[-LAST_LINES:]) or f"exit status {done.status}")
    return done.stdout.strip() or "(the program printed nothing)"


def _primes(rng: random.Random) -> Problem:
    n = rng.randint(20, 400)
    answer = sum(p for p in range(2, n) if all(p % d for d in range(2, math.isqrt(p) + 1)))
    return f"What is the sum of all prime numbers below {n}?", answer


def _divisors(rng: random.Random) -> Problem:
    n = rng.randint(100, 5_000)
    return f"How many positive divisors does {n} have?", sum(n % d == 0 for d in range(1, n + 1))


def _digits(rng: random.Random) -> Problem:
    base, power = rng.randint(2, 9), rng.randint(20, 60)
    return f"What is the sum of the decimal digits of {base}^{power}?", sum(map(int, str(base**power)))


def _multiples(rng: random.Random) -> Problem:
    a, b, n = rng.randint(3, 9), rng.randint(11, 19), rng.randint(200, 2_000)
    answer = sum(k % a == 0 or k % b == 0 for k in range(1, n + 1))
    return f"How many whole numbers from 1 to {n} are divisible by {a} or by {b}?", answer


def _paths(rng: random.Random) -> Problem:
    rows, columns = rng.randint(3, 12), rng.randint(3, 12)
    question = (
        f"A robot goes from the lower left to the upper right corner of a grid of {rows} by {columns} squares, along"
        " the lines, only up and right. How many paths are there?"
    )
    return question, math.comb(rows + columns, rows)


FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (_primes, _divisors, _digits, _multiples, _paths)


def train_tasks(seed: int = 0, count: int = 4096) -> Iterator[dict[str, Any]]:
    """`count` random problems that are not held out."""
    return _tasks(random.Random(f"train-{seed}"), count, held_out=False)


def heldout_tasks() -> list[dict[str, Any]]:
    """64 fixed problems that training does not use."""
    return list(_tasks(random.Random("held out"), 64, held_out=True))


def is_held_out(question: str) -> bool:
    """Whether a question is held out: a fifth of all questions is."""
    return random.Random(question).random() < 0.2


def _tasks(rng: random.Random, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    made = 0
    while made < count:
        family = rng.choice(FAMILIES)
        question, answer = family(rng)
        if is_held_out(question) == held_out:
            yield {"question": question, "answer": str(answer), "source": family.__name__.lstrip("_")}
            made += 1
