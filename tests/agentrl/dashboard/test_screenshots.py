"""The pictures of the documentation, made from a generated run. `AGENTRL_SCREENSHOTS=docs/assets` renews them.

AGENTRL_SCREENSHOTS=docs/assets .venv/bin/python -m pytest -m long -n 0 tests/agentrl/dashboard/test_screenshots.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Served, serving_dashboard, settled
from dashboards.generated_run import generate
from databases import Databases
from playwright.sync_api import Browser, FloatRect, Page
from sqlalchemy import func, select

from agentrl.store import Database
from agentrl.store.tables import step_trajectories, steps, trajectories

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[3]
SIZE = {"width": 1240, "height": 900}


@pytest.fixture(scope="module")
def generated(databases: Databases) -> Iterator[tuple[Served, dict[str, str]]]:
    """A served run of forty steps, and the addresses of its pictures."""
    with databases.lent("sqlite") as url:
        database = Database(url)
        run_id = generate(database, calls=8_000, trajectories=800, tasks=100)
        with database.read() as conn:
            step = conn.execute(select(func.max(steps.c.step)).where(steps.c.state == "published")).scalar_one()
            session_id = conn.execute(
                select(trajectories.c.session_id)
                .join(step_trajectories, step_trajectories.c.trajectory_id == trajectories.c.id)
                .where(trajectories.c.run_id == run_id)
                .order_by(trajectories.c.id)
                .limit(1)
            ).scalar_one()
        with serving_dashboard(database) as served:
            here = "/ui/runs/generated"
            addresses = {"run": here, "step": f"{here}/steps/{step}", "session": f"/ui/sessions/{session_id}"}
            yield served, addresses | {"pipeline": f"{here}/pipeline"}
        database.close()


@pytest.fixture
def visitor(browser: Browser, generated: tuple[Served, dict[str, str]]) -> Iterator[Page]:
    context = generated[0].signed_in(browser)
    page = context.new_page()
    page.set_viewport_size(SIZE)
    yield page
    context.close()


def picture(name: str, tmp_path: Path) -> Path:
    """Where a picture goes, one of the same name being in the documentation."""
    assert (ROOT / "docs" / "assets" / f"dashboard-{name}.png").exists()
    return ROOT / os.environ.get("AGENTRL_SCREENSHOTS", tmp_path) / f"dashboard-{name}.png"


@pytest.mark.parametrize(("name", "height"), [("run", 1240), ("step", 1250), ("session", 900), ("pipeline", 1240)])
def test_a_page_is_a_picture(
    visitor: Page, generated: tuple[Served, dict[str, str]], tmp_path: Path, name: str, height: int
) -> None:
    served, addresses = generated
    visitor.goto(served.url + addresses[name])
    settled(visitor)
    clip: FloatRect = {"x": 0, "y": 0, "width": SIZE["width"], "height": height}
    visitor.screenshot(path=picture(name, tmp_path), full_page=True, clip=clip)
    assert picture(name, tmp_path).stat().st_size > 40_000, "the page is nearly empty"


def test_the_ways_of_the_samples_are_a_picture(
    visitor: Page, generated: tuple[Served, dict[str, str]], tmp_path: Path
) -> None:
    served, addresses = generated
    visitor.goto(served.url + addresses["run"])
    visitor.locator("#live-samples svg").screenshot(path=picture("samples", tmp_path))
    assert picture("samples", tmp_path).stat().st_size > 10_000
