"""`get_math_verify_worker().verify(response, answer)`, as AReaL has it; needs math-verify."""

from __future__ import annotations

from functools import lru_cache

from agentrl.rollout.verifiers.math_answer import MathAnswer


class MathVerifyWorker:
    """Compares mathematical answers; call it through `AsyncRewardWrapper`, which has the time-out."""

    def __init__(self) -> None:
        self._equal = MathAnswer()

    def verify(self, response: str, ground_truth: str) -> float:
        """1 when the answer in `response` equals `ground_truth`, else 0."""
        return float(self._equal(completion=response, ground_truth=ground_truth))


@lru_cache(maxsize=1)
def get_math_verify_worker() -> MathVerifyWorker:
    """The worker of this process."""
    return MathVerifyWorker()
