"""Compares mathematical answers by their value, with the package math-verify (the extra `rewards`)."""

from __future__ import annotations

import logging
from typing import Any

from agentrl.errors import UserError
from agentrl.rollout.rewards.function_call import Unusable

MOST_CHARACTERS = 20_000
"""Only the end of a longer answer is read."""
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

    def __call__(self, completion: str, ground_truth: Any) -> float:
        """Compare. The time-outs of the package are off, as the call has one."""
        expected = self._parsed(str(ground_truth).rpartition(GSM8K)[2].strip())
        if not expected:
            raise Unusable(f"ground_truth {str(ground_truth)[:100]!r} is not a mathematical expression")
        answer = self._lib.parse(completion[-MOST_CHARACTERS:], parsing_timeout=None)
        return float(self._lib.verify(expected, answer, timeout_seconds=None))

    def _parsed(self, text: str) -> list[Any]:
        parsed: list[Any] = self._lib.parse(f"\\boxed{{{text}}}", parsing_timeout=None) if "$" not in text else []
        return parsed or list(self._lib.parse(text, parsing_timeout=None))
