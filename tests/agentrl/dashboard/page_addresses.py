"""An address of every page, for tests that open them all."""

from __future__ import annotations

from agentrl.dashboard.pages import page_list

ADDRESSES = {
    "/": "/",
    "/compare": "/compare?run=test&run=second",
    "/runs/{run}": "/runs/test",
    "/runs/{run}/series.json": "/runs/test/series.json",
    "/runs/{run}/samples": "/runs/test/samples?band=trained",
    "/runs/{run}/search": "/runs/test/search?text=say",
}
"""The path of a page → an address that shows much of it. `{session}` is a session that was trained."""
MORE = (
    "/compare",
    "/compare?run=test",
    "/runs/second",
    "/runs/test/samples?band=stale",
    "/runs/test/samples?band=without+calls",
    "/runs/test/search",
    "/runs/test/search?text=nothing+has+this",
)
"""Other states of these pages: empty ones above all."""
HTML = [ADDRESSES[page.path] for page in page_list.PAGES if page.template is not None and page.path in ADDRESSES]
EVERY = ["/sign-in", *HTML, *MORE]
