"""Runs samples of an Inspect task (https://inspect.aisi.org.uk, 0.3.285) with our model, one at a time.

Settings: `task`, a registered name or FILE@NAME; `task_args`; `eval_args`, further arguments of `inspect_ai.eval`;
`log_dir`, where the library's logs are kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import inspect_ai
from host_loop import main
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float

os.environ.setdefault("INSPECT_DISPLAY", "none")


class SampleFailed(Exception):
    """The library reports an error for the sample, or no score."""


class Samples:
    """The samples of a task."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def tasks(self) -> Iterator[dict[str, Any]]:
        """One for each sample, with the id that the library gives it."""
        from inspect_ai._eval.loader import load_tasks  # the library's own way from a name to a task

        (task,) = load_tasks([self.settings["task"]], self.settings.get("task_args") or {})
        for number, sample in enumerate(task.dataset, start=1):
            text = sample.input if isinstance(sample.input, str) else ""
            yield {"sample": number if sample.id is None else sample.id, "input": text, "data_source": task.name}

    async def play(self, request: dict[str, Any]) -> dict[str, float]:
        """Evaluate one sample; returns its scores by scorer."""
        model = get_model(
            "openai-api/agentrl/default", base_url=request["base_url"], api_key=request["api_key"], memoize=False
        )
        with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as folder:
            (log,) = await inspect_ai.eval_async(
                self.settings["task"],
                model=model,
                task_args=self.settings.get("task_args") or {},
                sample_id=[request["task"]["sample"]],
                epochs=1,
                metadata={"session_id": request["base_url"].partition("/sessions/")[2].partition("/")[0]},
                log_dir=self.settings.get("log_dir") or folder,
                **(self.settings.get("eval_args") or {}),
            )
        (sample,) = log.samples or [None]
        problem = log.error or (sample and sample.error)
        if problem or sample is None:
            raise SampleFailed(problem.message if problem else f"there is no sample {request['task']['sample']!r}")
        found = numbers(sample.scores or {})
        if not found:
            raise SampleFailed("the task has no scorer")
        return found

    async def __aenter__(self) -> Samples:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """Scores as numbers, as the library's metrics read them (C is 1, P 0.5, I and N are 0); those of a mapping as
    SCORER.KEY.
    """
    to_float, found = value_to_float(), {}
    for name, score in scores.items():
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        for key, value in values.items():
            found[".".join(part for part in (name, key) if part)] = to_float(value)
    return found


if __name__ == "__main__":
    main(Samples)
