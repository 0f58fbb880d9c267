"""A database with something to show on every page, served to a real browser."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Served, chromium, serving_dashboard
from databases import Databases
from history import LIMITS, TOOLS, History
from playwright.sync_api import Browser, BrowserContext, Page
from sqlalchemy import insert, select, update

from agentrl.domain.schemas import SessionStatus
from agentrl.store import Database, events, heartbeats
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import engines, interactions, runs, steps

sys.path.insert(0, str(Path(__file__).parent))  # for `import page_addresses`


@dataclass(frozen=True)
class Site:
    """A served dashboard of two runs, `test` and `second`."""

    served: Served
    history: History
    session_id: str  # one that was trained

    @property
    def url(self) -> str:
        return self.served.url


def fill(history: History) -> str:
    """Something for every page; returns a session that was trained."""
    history.train(3)
    history.group(tools=TOOLS)
    history.rejected(reward=False)
    history.evaluation({"source": "held-out"})
    with history.db.write() as conn:
        run_id = history.run_id
        new = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id() for _ in range(2)])
        history.play(conn, new.session_ids[0], reward=False)
        broken = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id() for _ in range(2)])
        for session_id in broken.session_ids:
            sealing.end(conn, session_id, SessionStatus.FAILED, "TimeoutError: the tool did not answer", LIMITS)
        for number, state in enumerate(("serving", "dead")):
            row = {"url": f"http://engine-{number}:3000", "state": state, "version": history.version - number}
            conn.execute(insert(engines).values(run_id=run_id, last_seen_at=0.0, **row))
        events.record(conn, run_id, "engine_died", {"url": "http://engine-1:3000"}, "proxy")
        heartbeats.beat(conn, run_id, "worker", "worker-1")
        for step in (1, 2, 3):
            metrics = {"reward/mean": 0.2 * step, "entropy": 1.0 / step, "length/output_mean": 40.0 + step, "loss": 0.1}
            metrics |= {"logprob_mismatch_mean_abs": 0.004, "importance_ratio/ess": 0.95, "drift": math.log(step)}
            metrics |= {f"time/{name}": 1.5 for name in ("train", "checkpoint", "wait_for_batch", "wait_for_policy")}
            conn.execute(update(steps).where(steps.c.run_id == run_id, steps.c.step == step).values(metrics=metrics))
        fork = select(interactions.c.id).where(interactions.c.run_id == run_id).limit(3)
        conn.execute(update(interactions).where(interactions.c.id.in_(fork)).values(fork_reason="history_edited"))
    return history.batches[1].trajectories[0].session_id


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
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
    session_id = fill(history)
    second = History(database, name="second", seed=2)
    second.train(2)
    with database.write() as conn:
        config = {"model": "other", "trainer": {"max_staleness": 4}, "api_key": "a secret"}
        conn.execute(update(runs).where(runs.c.id == second.run_id).values(config=config))
    with serving_dashboard(database) as served:
        yield Site(served, history, session_id)
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
