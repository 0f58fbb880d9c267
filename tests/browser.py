"""A real Chromium, driven by Playwright, and the dashboard of a database on a socket for it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Error, Page, sync_playwright
from starlette.applications import Starlette

from agentrl.dashboard import own_server
from agentrl.dashboard.dashboard_parts import Dashboard
from agentrl.store import Database

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
KEY = "arl-ui-of-a-test"
AXE = Path(__file__).parent / "vendor" / "axe.js"
WIDE, NARROW = {"width": 1300, "height": 900}, {"width": 360, "height": 740}
HARMLESS = ("[DOM] Password forms should have",)
"""How advice of the browser's console begins that is not followed: a key has no user name."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; skips the test where none starts. While it runs, this thread can run no coroutines."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium that starts: it is not installed")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found)
        except Error as error:
            pytest.skip(f"no Chromium that starts: {error}")
        yield browser
        browser.close()


@dataclass(frozen=True)
class Served:
    """A dashboard on a socket; `parts` is what its routes use."""

    url: str
    parts: Dashboard
    key: str = KEY

    def signed_in(self, browser: Browser) -> BrowserContext:
        """A browser profile that has signed in by the printed link."""
        context = browser.new_context(viewport=WIDE)
        page = context.new_page()
        page.goto(f"{self.url}/ui/sign-in#{self.key}")
        page.wait_for_url(f"{self.url}/ui/")
        page.close()
        return context


@contextmanager
def serving_dashboard(database: Database) -> Iterator[Served]:
    """Serve the dashboard of a database, in a thread, until the block ends."""
    app = own_server.application(database, KEY)
    pages = next(route.app for route in app.routes if isinstance(getattr(route, "app", None), Starlette))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", pages.state.dashboard)
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


@dataclass
class Watch:
    """What went wrong on a page: errors of scripts, messages of the console, dialogs."""

    faults: list[str] = field(default_factory=list)

    @classmethod
    def on(cls, page: Page) -> Watch:
        """Watch a page from now on."""
        made = cls()

        def said(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and not message.text.startswith(HARMLESS):
                made.faults.append(f"{message.type}: {message.text}")

        def asked(dialog: Dialog) -> None:
            made.faults.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("console", said)
        page.on("pageerror", lambda error: made.faults.append(f"script: {error}"))
        page.on("dialog", asked)
        return made


def settled(page: Page) -> None:
    """Wait until the scripts of the page have drawn its charts."""
    until(page, "[...document.querySelectorAll('[data-chart]')].every((one) => one.children.length > 0)")
    until(page, "[...document.querySelectorAll('time[datetime]')].every((one) => one.title)")


def until(page: Page, expression: str, most_s: float = 30.0) -> None:
    """Wait until an expression is true. Playwright's own wait evaluates it in the page, which the policy forbids."""
    ends = time.monotonic() + most_s
    while not page.evaluate(expression):
        assert time.monotonic() < ends, f"never true: {expression}"
        page.wait_for_timeout(50)


def axe_faults(page: Page) -> list[str]:
    """The serious and critical faults that axe-core finds, each with the element."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['html'][:160]} ({node['failureSummary'][:300]})"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
