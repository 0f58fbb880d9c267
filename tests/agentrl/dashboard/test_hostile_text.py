"""Whatever a model, a tool or an agent wrote is text on every page: nothing of it runs, and the pages stay usable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Watch, serving_dashboard, settled
from dashboard_site import Site, fill
from databases import Databases
from history import History
from page_addresses import EVERY
from playwright.sync_api import BrowserContext, Page, expect
from sqlalchemy import select, update

from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import (
    contents,
    engines,
    events,
    groups,
    interaction_data,
    interactions,
    rewards,
    runs,
    sessions,
    tasks,
    trajectories,
)

OWN = "document.title='owned';alert(1)"
HOSTILE = (
    f'</script><script>{OWN}</script><img src=x onerror="{OWN}"><svg onload="{OWN}"><a href="javascript:{OWN}">x</a>'
    f"\"' onfocus={OWN} autofocus [link](javascript:{OWN}) ![i](http://evil.example/x) "
    "{{ 7777 * 7777 }} {% raw %} <!--"
    " \x1b[31mred\x1b]0;owned\x07 \u202eesrever\u2066\u200b needle"
)
LINE = "z" * 10_000_000 + HOSTILE
ACTIVE = "main script, main style, main iframe, main object, main embed, main img, main foreignObject"
HANDLERS = """[...document.querySelectorAll("*")].flatMap((one) => one.getAttributeNames())
    .filter((name) => name.startsWith("on"))"""
FOREIGN_LINKS = """[...document.querySelectorAll("[href]")].map((one) => one.getAttribute("href"))
    .filter((href) => !/^(\\/ui\\/|#|data:,$)/.test(href))"""


def plant(history: History) -> None:
    """Put the text wherever others write, in every row; a line of 10 MB into prompts and answers of some calls."""
    call = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    answer = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]}
    prompt = [{"role": HOSTILE, "content": HOSTILE}, {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE}]
    tool = {"type": "function", "function": {"name": HOSTILE, "description": HOSTILE, "parameters": {HOSTILE: HOSTILE}}}
    long_prompt = [{"role": "user", "content": LINE}]
    with history.db.write() as conn:
        packed = {"new_messages": codec.pack_json(prompt), "answer": codec.pack_json(answer)}
        conn.execute(update(interaction_data).values(**packed))
        some = conn.execute(select(interactions.c.id).order_by(interactions.c.id.desc()).limit(3)).scalars().all()
        packed = {"new_messages": codec.pack_json(long_prompt), "answer": codec.pack_json(answer | {"content": LINE})}
        conn.execute(update(interaction_data).where(interaction_data.c.interaction_id.in_(some)).values(**packed))
        conn.execute(update(interactions).values(error=HOSTILE))
        conn.execute(update(contents).values(body=codec.pack_json([tool])))
        metadata = {HOSTILE: HOSTILE, "x": LINE[: 10**6]}
        conn.execute(update(sessions).values(error=HOSTILE, answer=HOSTILE, metadata=metadata))
        conn.execute(update(rewards).values(name=HOSTILE[:100], source=HOSTILE[-100:]))
        conn.execute(update(trajectories).where(trajectories.c.reason.is_not(None)).values(reason=HOSTILE[:100]))
        conn.execute(update(tasks).values(data={HOSTILE: HOSTILE}))
        conn.execute(update(groups).where(groups.c.is_eval.is_(True)).values(task={"q": HOSTILE}))
        conn.execute(update(events).values(kind=HOSTILE[:50], source=HOSTILE[:100], data={HOSTILE: HOSTILE}))
        conn.execute(update(engines).values(error=HOSTILE))
        config = {"name": "test", "model": HOSTILE, "agent": HOSTILE, "tasks": HOSTILE, HOSTILE: HOSTILE}
        about = {"config": config, "error": HOSTILE, "status": "failed"}
        conn.execute(update(runs).where(runs.c.id == history.run_id).values(**about))


@pytest.fixture(scope="module")
def site(databases: Databases) -> Iterator[Site]:
    """Two runs whose texts are hostile."""
    with databases.lent("sqlite") as url:
        database = Database(url)
        history = History(database, seed=1)
        session_id, task_id = fill(history)
        History(database, name="second", seed=2).train(2)
        plant(history)
        with serving_dashboard(database) as served:
            yield Site(served, history, session_id, task_id)
        database.close()


@pytest.fixture(autouse=True)
def nothing_leaves(profile: BrowserContext, site: Site) -> Iterator[list[str]]:
    """Collects the requests to other servers: none may be sent."""
    sent: list[str] = []
    profile.on("request", lambda request: sent.append(request.url) if not request.url.startswith(site.url) else None)
    yield sent
    assert [url for url in sent if not url.startswith(("data:", "chrome"))] == []


@pytest.mark.parametrize("address", EVERY)
def test_nothing_runs_and_the_page_stays_usable(page: Page, site: Site, address: str) -> None:
    watch = Watch.on(page)
    answer = page.goto(site.address(address))
    settled(page)
    assert answer.status == 200
    body = answer.body()
    assert len(body) < 3_000_000
    for never in ("\x1b", "\x07", "\u202e", "\u2066", "\u200b"):
        assert never not in body.decode()
    page.keyboard.press("Tab")
    assert page.locator(ACTIVE).count() == 0
    assert page.evaluate(HANDLERS) == []
    assert page.evaluate(FOREIGN_LINKS) == []
    assert "owned" not in page.title()
    assert "60481729" not in page.content()
    wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room
    assert watch.faults == []


def search_on(page: Page) -> None:
    """Search older sessions until one matches: a search ends after a while, wherever it is."""
    while not page.locator("tbody tr").count():
        page.get_by_role("link", name="Search older ones").click()


def test_the_text_is_shown_with_its_control_characters_spelled_out(page: Page, site: Site) -> None:
    page.goto(f"{site.url}/ui/runs/test/search?text=needle")
    search_on(page)
    cell = page.locator("tbody td.text").first
    expect(cell).to_contain_text("\\x1b[31mred")
    expect(cell).to_contain_text("\\u202eesrever")
    expect(cell.locator("mark")).to_have_text("needle")


def test_a_hostile_search_finds_itself_and_keeps_its_words(page: Page, site: Site) -> None:
    words = HOSTILE[: HOSTILE.index("\x1b")].strip()[:200]
    page.goto(f"{site.url}/ui/runs/test/search")
    page.get_by_label("text in prompts and outputs").fill(words)
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_label("text in prompts and outputs")).to_have_value(words)
    search_on(page)
    expect(page.locator("tbody mark").first).to_have_text(words)
    assert "owned" not in page.title()


@pytest.mark.parametrize(
    "path", ["/runs/%3Cscript%3E", "/runs/test/samples?band=%3Cscript%3E", "/compare?run=%1B%5B31m", "/%3Cimg%3E"]
)
def test_a_hostile_address_is_refused_inertly(page: Page, site: Site, path: str) -> None:
    answer = page.goto(f"{site.url}/ui{path}")
    assert answer.status in (400, 404)
    assert page.locator(ACTIVE).count() == 0
