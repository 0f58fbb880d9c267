"""A database with something to show on every page, served to a real browser."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, serving_dashboard
from databases import Databases
from history import History
from playwright.sync_api import Browser, BrowserContext, Page, expect
from sqlalchemy import update

from agentrl.store import Database
from agentrl.store.tables import runs

sys.path.insert(0, str(Path(__file__).parent))  # for `import dashboard_site`
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # for `import dashboards`
from dashboard_site import Site, fill

PATIENCE_MS = 30_000.0
"""How long `expect` waits on a busy machine, as pages do by themselves; Playwright's own 5 s are too few."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with chromium() as made:
        yield made


@pytest.fixture
def own_site(databases: Databases) -> Iterator[Site]:
    """A site that the test changes."""
    with databases.lent("sqlite") as url:
        yield from _site(url)


@pytest.fixture(scope="module")
def site(databases: Databases) -> Iterator[Site]:
    """The site of all tests of a module that change nothing."""
    with databases.lent("sqlite") as url:
        yield from _site(url)


def _site(url: str) -> Iterator[Site]:
    database = Database(url)
    history = History(database, seed=1)
    session_id, task_id = fill(history)
    second = History(database, name="second", seed=2)
    second.train(2)
    with database.write() as conn:
        config = {"model": "other", "trainer": {"max_staleness": 4}, "api_key": "a secret"}
        conn.execute(update(runs).where(runs.c.id == second.run_id).values(config=config))
    with serving_dashboard(database) as served:
        yield Site(served, history, session_id, task_id)
    database.close()


@pytest.fixture(scope="module")
def profile(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    """A browser profile that has signed in to `site`."""
    context = site.served.signed_in(browser)
    yield context
    context.close()


@pytest.fixture
def page(profile: BrowserContext) -> Iterator[Page]:
    """A new page of that profile."""
    made = profile.new_page()
    yield made
    made.close()
