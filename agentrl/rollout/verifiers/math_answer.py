"""Compares mathematical answers by their value, with the package math-verify (the extra `rewards`)."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from agentrl.errors import UserError
from agentrl.rollout.rewards.function_call import Unusable
from agentrl.rollout.rewards.function_value import Graded

MOST_CHARACTERS = 20_000
"""Only the end of a longer answer is read."""
DECIMAL = re.compile(r"-?\d+\.\d*")
GSM8K = "####"
"""What precedes the result in the solutions of GSM8K."""


class MathAnswer:
    """1 if the last mathematical expression of the answer, in `\\boxed{}` if there is one, equals the expected one."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError:
            raise UserError("the verifier `math` needs math-verify: pip install 'agentrl[rewards]'") from None
        self._lib = math_verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off

    def __call__(self, completion: str, ground_truth: Any) -> Graded:
        """Compare. The time-outs of the package are off, as the call has one."""
        expected = self._parsed(str(ground_truth).rpartition(GSM8K)[2].strip())
        if not expected:
            raise Unusable(f"ground_truth {str(ground_truth)[:100]!r} is not a mathematical expression")
        answer = self._lib.parse(completion[-MOST_CHARACTERS:], parsing_timeout=None)
        right = bool(self._lib.verify(expected, answer, timeout_seconds=None))
        return Graded(float(right), _text(expected if right else answer))

    def _parsed(self, text: str) -> list[Any]:
        parsed: list[Any] = self._lib.parse(f"\\boxed{{{text}}}", parsing_timeout=None) if "$" not in text else []
        return parsed or list(self._lib.parse(text, parsing_timeout=None))


def _text(parsed: list[Any]) -> str | None:
    """One text for equal expressions: a number as a fraction, others as SymPy writes them; None without one."""
    if not parsed:
        return None
    text = str(parsed[0])
    return str(Fraction(text)) if DECIMAL.fullmatch(text) else text
