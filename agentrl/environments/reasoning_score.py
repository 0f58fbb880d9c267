"""Scores answers to reasoning-gym's tasks as the library does, with its partial credit."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import orjson

from agentrl.domain.schemas import Json
from agentrl.environments.evaluated_answers import readable
from agentrl.environments.exact_json import decoded
from agentrl.environments.optional_import import library
from agentrl.environments.reasoning_tasks import make
from agentrl.errors import UserError
from agentrl.rollout.verifiers.text_match import found

log = logging.getLogger(__name__)
FIELD = "reasoning_gym"
DATASETS = 256
"""Generators with settings of their own that a process keeps."""


class ReasoningScore:
    """A reward function: the library's score of an answer, from 0 to 1.

    The answer is the text between the task's tags; else the last match of `pattern`, or of its first group; else the
    whole text, without white space at its ends. No answer earns 0. So does an answer on which the generator raises,
    with a warning that names the generator and the error.
    """

    def __init__(self, pattern: str | None = None) -> None:
        library("reasoning_gym")  # takes a second, before the first call's timeout
        self._pattern = pattern

    def __call__(self, completion: str, task: Json) -> float:
        """The score of an answer to a task of `reasoning_tasks`."""
        if FIELD not in task:
            raise UserError(f"the task has no field {FIELD!r}: it is not of agentrl.environments.reasoning_tasks")
        about = task[FIELD]
        answer = self.answer_in(completion, about["tag"])
        if answer is None:
            return 0.0
        dataset = _dataset(about["name"], orjson.dumps(about["config"]), about["seed"])
        return score_of(dataset, answer, decoded(about["entry"]), about["name"])

    def answer_in(self, completion: str, tag: str | None) -> str | None:
        """The answer in a text; None if there is none."""
        if tag is not None:
            from reasoning_gym.utils import extract_answer

            answer: str | None = extract_answer(completion, tag_name=tag)
            return answer
        answer = found(completion, self._pattern)
        return None if answer is None else answer.strip()


def score_of(dataset: Any, answer: str, entry: Json, name: str) -> float:
    """The library's score; 0 where it raises. Code in an answer is not run."""
    source = str(entry["metadata"].get("source_dataset", name))  # of an item of `composite`: its generator
    try:
        return float(dataset.score_answer(answer=readable(name, readable(source, answer)), entry=entry))
    except Exception as error:  # noqa: BLE001 - parsers of 106 generators, which raise whatever an odd answer leads to
        log.warning("reasoning-gym's %s cannot read the answer %r: %r; it earns 0", name, answer[:100], error)
        return 0.0


@lru_cache(maxsize=DATASETS)
def _dataset(name: str, config: bytes, seed: int) -> Any:
    """A generator whose settings are those of the task; it generates nothing but what its constructor does."""
    return make(name, orjson.loads(config) | {"seed": seed, "size": 1}, name)
