"""Scores given answers as a run would, without a run: `agentrl try-reward`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.answering.task_messages import messages_of
from agentrl.rollout.rewards.answer_scorer import RewardFailed, Scorer
from agentrl.rollout.rewards.answers import answer_of
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.score import Score

COMPLETION = "completion"
"""Field of a line that holds the answer; the other fields are the task."""
LONGEST_LINE = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """The result for one answer: its score, or why it has none."""

    answer: Json
    score: Score | None
    error: str | None
    wall_s: float


def read_answers(path: Path, config: RunConfig) -> Iterator[Json]:
    """The answers of a JSONL file: each line is a task with the field `completion`. Raises UserError."""
    options = {name: config.agent_args.get(name) for name in ("system", "template")}
    try:
        with path.open() as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _answer(line, f"{path} line {number}", options)
    except OSError as error:
        raise UserError(f"--answers: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--answers: cannot read {path}: {error}") from error


def _answer(line: str, where: str, options: Json) -> Json:
    try:
        task = json.loads(line) if len(line) <= LONGEST_LINE else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--answers: {where} is not JSON: {error}") from error
    if not isinstance(task, dict) or not isinstance(task.get(COMPLETION), str):
        raise UserError(f"--answers: {where} must be a mapping with the text `{COMPLETION}`")
    text = task.pop(COMPLETION)
    return answer_of(task, messages_of(task, **options), text, turn=1, is_eval=False)


def recorded_answer(session: Json) -> Json | None:
    """The answer of a recorded session, as `rescoring_view` describes it; None for a session without an answer."""
    messages = session["messages"]
    if not messages or messages[-1].get("role") != "assistant":
        return None
    last = [call for call in session["calls"] if call["answer"] == messages[-1]][-1]
    reply = {"choices": [{"message": messages[-1], "finish_reason": last["finish_reason"]}]}
    return answer_of(session["task"] or {}, messages[:-1], reply, turn=1, is_eval=False)


async def try_answers(config: RewardConfig, answers: Sequence[Json]) -> list[Tried]:
    """Score the answers, as many at a time as there are processes. Batched functions get one answer. Raises UserError
    when a function cannot be loaded.
    """
    places = asyncio.Semaphore(2 * config.processes)
    async with RewardPool(config) as pool:
        await pool.facts()
        scorer = Scorer(config, pool)

        async def one(answer: Json) -> Tried:
            async with places:
                began, score, error = time.monotonic(), None, None
                try:
                    score = await scorer.score(answer)
                except RewardFailed as failed:
                    error = str(failed)
                return Tried(answer=answer, score=score, error=error, wall_s=time.monotonic() - began)

        return await asyncio.gather(*map(one, answers))
