"""The messages between a rollout worker and a process that runs agents: lines of JSON.

worker ══ {"config"}              ══► process ══ {"ready": {"pid"}} or {"error"}     ══► worker
worker ══ {"id", "data", "extra"} ══► process ══ {"id", "result"} or {"id", "error"} ══► worker
worker ══ {"cancel": id}          ══► process
worker ══ {"ping": n}             ══► process ══ {"pong": n, "rss_mb", "slowed"}     ══► worker

`slowed`: it cannot get its priority back (own_priority.py).
"""

from __future__ import annotations

from dataclasses import asdict

from agentrl.domain import answer_text
from agentrl.domain.schemas import Json
from agentrl.domain.verdicts import Range
from agentrl.rollout.score import Result, Reward

LONGEST_LINE_BYTES = 64 * 2**20


def result_json(result: Result) -> Json:
    """A result as JSON."""
    return {
        "rewards": [asdict(reward) for reward in result.rewards],
        "trained_tokens": result.trained_tokens,
        "reject": result.reject,
        "answer": answer_text.bounded(result.answer),
        "stats": dict(result.stats),
        "truncated": result.truncated,
    }


def read_result(message: Json) -> Result:
    """Inverse of `result_json`."""
    return Result(
        rewards=tuple(Reward(**reward) for reward in message["rewards"]),
        trained_tokens=_ranges(message["trained_tokens"]),
        reject=message["reject"],
        answer=message["answer"],
        stats=message["stats"],
        truncated=message["truncated"],
    )


def _ranges(found: Json | None) -> dict[str, list[Range]] | None:
    if found is None:
        return None
    return {call: [(start, end) for start, end in of_call] for call, of_call in found.items()}
