"""Every page: its path below `/ui`, its template, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pages import (
    compare_page,
    engines_page,
    events_page,
    home_page,
    pipeline_page,
    run_page,
    samples_page,
    search_page,
    series_data,
    session_page,
)
from agentrl.dashboard.pages.results import evaluations_page, step_page, steps_page, task_page, tasks_page
from agentrl.domain.schemas import Json
from agentrl.store import Connection

Reader = Callable[[Connection, Any, Mapping[str, str], Query], Json]


@dataclass(frozen=True, slots=True)
class Page:
    """`read(conn, run_id, path parameters, query)` gives the template's values; without a template, the JSON itself.

    The run is the one that the path names, by `run` or by `session`. A page without one gets the run that the viewer
    is bound to, or None; one of several runs gets the `Runs` that its query names.
    """

    path: str
    template: str | None
    read: Reader
    most_runs: int = 0
    """How many runs the parameter `run` may name; 0 for a page of one run or of all."""

    @property
    def run_of(self) -> str | None:
        """The path parameter that decides about the run."""
        return next((name for name in ("run", "session") if f"{{{name}}}" in self.path), None)


PAGES = (
    Page("/", "home.html", home_page.read),
    Page("/compare", "compare.html", compare_page.read, most_runs=6),
    Page("/runs/{run}", "run.html", run_page.read),
    Page("/runs/{run}/series.json", None, series_data.read),
    Page("/runs/{run}/samples", "samples.html", samples_page.read),
    Page("/sessions/{session}", "session.html", session_page.read),
    Page("/sessions/{session}/tokens", "session.html", session_page.read_tokens),
    Page("/sessions/{session}/tokens.json", None, session_page.token_arrays),
    Page("/runs/{run}/steps", "steps.html", steps_page.read),
    Page("/runs/{run}/steps/{step}", "step.html", step_page.read),
    Page("/runs/{run}/pipeline", "pipeline.html", pipeline_page.read),
    Page("/runs/{run}/tasks", "tasks.html", tasks_page.read),
    Page("/runs/{run}/tasks/{task}", "task.html", task_page.read),
    Page("/runs/{run}/evaluations", "evaluations.html", evaluations_page.read),
    Page("/runs/{run}/engines", "engines.html", engines_page.read),
    Page("/runs/{run}/events", "events.html", events_page.read),
    Page("/runs/{run}/search", "search.html", search_page.read),
)
