"""Runs the code of an answer in a sandbox, against tests."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.rollout.rewards.function_call import Unusable
from agentrl.sandbox import Limits, run_python
from agentrl.sandbox.isolation import BASE_PYTHON, Isolation, choose

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
MOST_CASES = 100


class CodeTests:
    """1 if the answer's last block of Python passes all tests; with `partial`, the share of cases that pass.

    `tests` is Python text with assertions, or cases: `[{"input": stdin, "output": stdout}, …]`, or `{"inputs": […],
    "outputs": […]}`. All cases together may take `time_s`; a program that takes longer fails the rest.
    """

    def __init__(
        self,
        time_s: float = 10.0,
        memory_mb: int = 1024,
        partial: bool = False,
        python: str = BASE_PYTHON,
        readable: Sequence[str] = (),
        isolation: Isolation | None = None,
    ) -> None:
        choose(isolation)
        self.time_s, self.memory_mb, self.partial = time_s, memory_mb, partial
        self.options: dict[str, Any] = {"python": python, "readable": readable, "isolation": isolation}

    def __call__(self, completion: str, tests: Any) -> float:
        """Run the tests."""
        blocks = FENCED.findall(completion)
        source = blocks[-1] if blocks else completion
        if isinstance(tests, str):
            return float(asyncio.run(self._asserts(source, tests)))
        return asyncio.run(self._cases(source, _cases_of(tests)))

    async def _asserts(self, source: str, tests: str) -> bool:
        """Whether the assertions hold. They have been reached if the program prints what only its stdin says, so a
        program that exits early fails.
        """
        word = secrets.token_hex(16)
        reached = "import sys as _sys\n_sys.__stdout__.write(_sys.__stdin__.readline())\n"
        done = await run_python(
            f"{source}\n\n{tests}\n\n{reached}", stdin=f"{word}\n", limits=self._limits(self.time_s), **self.options
        )
        return done.ok and done.stdout.endswith(f"{word}\n")

    async def _cases(self, source: str, cases: Sequence[tuple[str, str]]) -> float:
        """The share of cases whose output is the expected one, apart from white space at the ends of lines."""
        deadline, passed = time.monotonic() + self.time_s, 0
        for given, expected in cases:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            done = await run_python(source, stdin=given, limits=self._limits(left_s), **self.options)
            right = done.ok and _lines(done.stdout) == _lines(expected)
            if not right and not self.partial:
                break
            passed += right
        return passed / len(cases) if self.partial else float(passed == len(cases))

    def _limits(self, time_s: float) -> Limits:
        return Limits(time_s=time_s, memory_mb=self.memory_mb)


def _cases_of(tests: Any) -> list[tuple[str, str]]:
    """Pairs of stdin and stdout. Raises Unusable."""
    try:
        if isinstance(tests, Mapping):
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        else:
            pairs = [(case["input"], case["output"]) for case in tests]
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"tests: neither text, nor cases with `input` and `output` ({error!r})") from None
    if not 0 < len(pairs) <= MOST_CASES:
        raise Unusable(f"tests: {len(pairs)} cases; 1 to {MOST_CASES} are possible")
    return [(_text(given), _text(expected)) for given, expected in pairs]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
