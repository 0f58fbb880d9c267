"""An address of every page, for tests that open them all."""

from __future__ import annotations

import pytest

from agentrl.dashboard.pages import page_list

ADDRESSES = {
    "/": "/",
    "/compare": "/compare?run=test&run=second",
    "/runs/{run}": "/runs/test",
    "/runs/{run}/series.json": "/runs/test/series.json",
    "/runs/{run}/samples": "/runs/test/samples?band=trained",
    "/runs/{run}/search": "/runs/test/search?text=say",
    "/runs/{run}/steps": "/runs/test/steps",
    "/runs/{run}/steps/{step}": "/runs/test/steps/1?discount=0.5",
    "/runs/{run}/pipeline": "/runs/test/pipeline",
    "/runs/{run}/tasks": "/runs/test/tasks",
    "/runs/{run}/tasks/{task}": "/runs/test/tasks/{task}",
    "/runs/{run}/evaluations": "/runs/test/evaluations",
    "/runs/{run}/engines": "/runs/test/engines",
    "/runs/{run}/events": "/runs/test/events",
    "/sessions/{session}": "/sessions/{session}",
    "/sessions/{session}/tokens": "/sessions/{session}/tokens",
    "/sessions/{session}/tokens.json": "/sessions/{session}/tokens.json",
}
"""The path of a page → an address that shows much of it. `{session}` was trained, `{task}` is its task."""
MORE = (
    "/compare",
    "/compare?run=test",
    "/runs/second",
    "/runs/test/samples?band=stale",
    "/runs/test/samples?band=without+calls",
    "/runs/test/search",
    "/runs/test/search?text=nothing+has+this",
    "/runs/test/steps/3",
    "/runs/second/pipeline",
    "/runs/second/tasks",
    "/runs/second/evaluations",
    "/runs/second/engines",
    "/sessions/{session}?tab=raw",
    "/sessions/{session}?tab=timeline",
    "/sessions/{session}?tab=lineage",
    "/sessions/{session}?beside={session}",
)
"""Other states of these pages, empty ones above all: long."""
HTML = [ADDRESSES[page.path] for page in page_list.PAGES if page.template is not None and page.path in ADDRESSES]
EVERY = ["/sign-in", *HTML, *(pytest.param(address, marks=pytest.mark.long) for address in MORE)]
