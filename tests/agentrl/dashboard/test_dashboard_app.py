"""Routes without a browser: headers, what a viewer may see, comparisons, forms of other sites."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from history import History
from starlette.applications import Starlette
from starlette.routing import Mount

from agentrl.dashboard import dashboard_app
from agentrl.dashboard.dashboard_parts import POLICY, ROOT, Dashboard
from agentrl.dashboard.sign_in import COOKIE, Signer, Viewer
from agentrl.errors import RequestError
from agentrl.store import Database
from agentrl.store.db.codec import hash_key

HTML = {"accept": "text/html"}
OF_ONE, OF_ALL = "key-of-test", "key-of-all"


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture
def histories(db: Database) -> dict[str, History]:
    made = {name: History(db, name=name, seed=n) for n, name in enumerate(("test", "second"))}
    for history in made.values():
        history.train(2)
    return made


class TwoKeys:
    """A door for a key of one run and for a key of all."""

    def __init__(self, run_id: str) -> None:
        self.viewers = {hash_key(OF_ONE): Viewer(run_id), hash_key(OF_ALL): Viewer()}

    async def find(self, key_hash: str) -> Viewer:
        if key_hash not in self.viewers:
            raise RequestError(401, "the key is not valid", code="invalid_api_key")
        return self.viewers[key_hash]


@pytest.fixture
def dashboard(db: Database, histories: dict[str, History]) -> Dashboard:
    async def read(then, query, *args) -> Any:
        return then(db.query(query, *args))

    return Dashboard(read=read, door=TwoKeys(histories["test"].run_id), signer=Signer(b"s"))


@pytest.fixture
async def client(dashboard: Dashboard) -> AsyncIterator[httpx.AsyncClient]:
    app = dashboard_app.create()
    dashboard_app.install(app, dashboard)
    transport = httpx.ASGITransport(Starlette(routes=[Mount(ROOT, app)]))
    async with httpx.AsyncClient(transport=transport, base_url="http://here/ui") as made:
        yield made


async def signed_in(client: httpx.AsyncClient, key: str) -> httpx.AsyncClient:
    answer = await client.post("/sign-in", data={"key": key, "next": "/ui/"})
    assert answer.status_code == 303
    return client


async def test_every_answer_has_the_headers_that_keep_a_page_inert(client: httpx.AsyncClient) -> None:
    await signed_in(client, OF_ALL)
    for path in (
        "/",
        "/sign-in",
        "/runs/test",
        "/runs/none",
        "/nowhere",
        "/runs/test/series.json",
        "/runs/test/search?low=x",
    ):
        answer = await client.get(path)
        assert answer.headers["content-security-policy"] == POLICY, path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["cache-control"] == "no-store", path
    script = await client.get("/static/page.js?v=1")
    assert "immutable" in script.headers["cache-control"]
    assert (await client.get("/static/../dashboard_app.py")).status_code == 404
    assert (await client.get("/static/%2e%2e/dashboard_app.py")).status_code == 404


async def test_the_key_of_a_run_shows_this_run_alone(client: httpx.AsyncClient, histories: dict[str, History]) -> None:
    await signed_in(client, OF_ONE)
    home = (await client.get("/")).text
    assert "/ui/runs/test" in home
    assert "second" not in home
    hidden = histories["second"]
    session = hidden.batches[1].trajectories[0].session_id
    for path in (
        "/runs/second", f"/runs/{hidden.run_id}", "/runs/second/search", "/runs/second/series.json",
        "/runs/second/live", f"/sessions/{session}", "/compare?run=second",
        "/compare?run=test&run=second",
        "/compare?run=none",
    ):  # fmt: skip
        answer = await client.get(path)
        assert answer.status_code == 404, path
        assert "second" not in answer.text, path
    alone = (await client.get("/compare?run=test")).text
    assert "Your key opens one run" in alone


async def test_runs_are_compared(client: httpx.AsyncClient, histories: dict[str, History]) -> None:
    await signed_in(client, OF_ALL)
    page = (await client.get("/compare?run=test&run=second")).text
    assert 'data-series="/ui/runs/test/series.json /ui/runs/second/series.json"' in page
    assert 'data-names="test second"' in page
    same = await client.get(f"/compare?run=test&run={histories['test'].run_id}")  # one run by its name and by its id
    assert "Choose two to six runs" in same.text
    too_many = await client.get("/compare?" + "&".join(f"run=r{n}" for n in range(7)))
    assert too_many.status_code == 400
    assert "at most 6" in too_many.text


async def test_viewers_of_different_keys_do_not_share_pages(client: httpx.AsyncClient) -> None:
    await signed_in(client, OF_ALL)
    assert "second" in (await client.get("/")).text
    await signed_in(client, OF_ONE)
    assert "second" not in (await client.get("/")).text


async def test_a_key_that_no_longer_opens_ends_the_visit(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
    await signed_in(client, OF_ALL)
    dashboard.door.viewers.clear()
    answer = await client.get("/runs/test", headers=HTML)
    assert answer.status_code == 401
    assert "the key is not valid" in answer.text
    assert 'value="/ui/runs/test"' in answer.text


async def test_a_page_without_a_key_is_not_shown(client: httpx.AsyncClient) -> None:
    answer = await client.get("/runs/test?x=1", headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sign-in?next=/ui/runs/test%3Fx%3D1")
    assert (await client.get("/runs/test/series.json")).status_code == 401
    client.cookies.set(COOKIE, Signer(b"another").cookie(OF_ALL), domain="here", path="/ui")
    assert (await client.get("/runs/test/series.json")).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        pytest.param({"origin": "null"}, marks=pytest.mark.long),
        {"sec-fetch-site": "cross-site"},
        pytest.param({"sec-fetch-site": "same-site"}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("path", ["/sign-in", "/sign-out"])
async def test_forms_of_other_sites_are_refused(client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    answer = await client.post(path, data={"key": OF_ALL}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


async def test_a_form_is_bounded(client: httpx.AsyncClient) -> None:
    assert (await client.post("/sign-in", content=b"key=" + b"x" * 5000)).status_code == 413
    many = await client.post("/sign-in", content=b"&".join(b"a=1" for _ in range(50)))
    assert many.status_code == 400


@pytest.mark.parametrize(
    ("asked", "after"),
    [
        ("/ui/runs/test?a=b", "/ui/runs/test?a=b"),
        ("//evil.example/ui/", "/ui/"),
        ("https://evil.example/ui/", "/ui/"),
        ("/ui/\\evil", "/ui/"),
        ("/ui/\r\nset-cookie: a=b", "/ui/"),
        ("/uix", "/ui/"),
        ("/ui/é", "/ui/"),
        ("", "/ui/"),
    ],
)
async def test_after_the_sign_in_comes_a_page_of_ours(client: httpx.AsyncClient, asked: str, after: str) -> None:
    answer = await client.post("/sign-in", data={"key": OF_ALL, "next": asked})
    assert answer.headers["location"] == after
    flags = answer.headers["set-cookie"].lower()
    assert "httponly" in flags
    assert "samesite=strict" in flags
    assert "path=/ui" in flags
    assert "secure" not in flags


async def test_over_https_the_cookie_stays_there(dashboard: Dashboard) -> None:
    app = dashboard_app.create()
    dashboard_app.install(app, dashboard)
    transport = httpx.ASGITransport(Starlette(routes=[Mount(ROOT, app)]))
    async with httpx.AsyncClient(transport=transport, base_url="https://here/ui") as client:
        answer = await client.post("/sign-in", data={"key": OF_ALL})
    assert "secure" in answer.headers["set-cookie"].lower()
