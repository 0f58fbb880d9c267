"""The dashboard of a proxy: `/` leads to it, and each power of key opens what it may, for as long as it is valid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from run_records import create_run
from sqlalchemy import update

from agentrl.domain.schemas import Power
from agentrl.store import key_records
from agentrl.store.tables import keys

HTML = {"accept": "text/html"}


@contextmanager
def visitor(proxy) -> Iterator[httpx.Client]:
    """A browser without a cookie."""
    with httpx.Client(base_url=proxy.url, headers=HTML, timeout=60) as client:
        yield client


def signed_in(client: httpx.Client, key: str) -> httpx.Client:
    answer = client.post("/ui/sign-in", data={"key": key, "next": "/ui/"})
    assert answer.status_code == 303, answer.text
    return client


@pytest.fixture
def with_another_run(proxy):
    """The proxy's database holds another run too."""
    with proxy.database.write() as conn:
        create_run(conn, name="another", key="key-of-another")
    return proxy


def test_the_root_leads_to_the_pages_which_need_a_key(proxy) -> None:
    with visitor(proxy) as client:
        answer = client.get("/")
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")
        answer = client.get("/ui/")
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sign-in?next=/ui/")
        assert client.get("/ui/", headers={"accept": "application/json"}).status_code == 401
        assert (
            client.get("/ui/", headers={"authorization": "Bearer admin-key"}).status_code == 303
        )  # cookies alone count
        assert client.get("/ui/sign-in").status_code == 200
        assert client.get("/ui/static/page.js").status_code == 200


def test_a_run_key_shows_its_run_alone(with_another_run) -> None:
    with visitor(with_another_run) as client:
        signed_in(client, "run-key")
        home = client.get("/ui/").text
        assert "/ui/runs/test" in home
        assert "another" not in home
        assert client.get("/ui/runs/test").status_code == 200
        assert client.get("/ui/runs/another").status_code == 404


def test_an_admin_key_shows_every_run(with_another_run) -> None:
    with visitor(with_another_run) as client:
        signed_in(client, "admin-key")
        assert "/ui/runs/another" in client.get("/ui/").text
        assert client.get("/ui/runs/another").status_code == 200


@pytest.mark.parametrize("key", ["wrong", "", "key-of-another"])
def test_a_key_that_is_not_of_this_proxy_opens_nothing(with_another_run, key: str) -> None:
    with visitor(with_another_run) as client:
        answer = client.post("/ui/sign-in", data={"key": key})
        assert answer.status_code == 401
        assert 'role="alert"' in answer.text
        assert "is not valid" in answer.text
        assert "set-cookie" not in answer.headers


def test_a_session_key_opens_no_pages(proxy) -> None:
    session = proxy.session()
    with visitor(proxy) as client:
        answer = client.post("/ui/sign-in", data={"key": session["api_key"]})
        assert answer.status_code == 403
        assert "use a run key or an admin key" in answer.text.replace("&#39;", "'")
        assert "set-cookie" not in answer.headers


def test_a_revoked_key_opens_nothing_from_then_on(proxy, until) -> None:
    made = proxy.database.transact(key_records.create, proxy.run_id, Power.RUN, "a viewer")
    with visitor(proxy) as client:
        signed_in(client, made.key)
        assert client.get("/ui/runs/test").status_code == 200
        proxy.database.transact(key_records.revoke, proxy.run_id, made.id)
        until(lambda: client.get("/ui/runs/test").status_code == 401)
        answer = client.get("/ui/runs/test")
        assert "the API key has been revoked" in answer.text
        assert 'value="/ui/runs/test"' in answer.text  # where to go after another sign-in
        again = client.post("/ui/sign-in", data={"key": made.key})
        assert again.status_code == 401
        assert "the API key has been revoked" in again.text


def test_an_expired_key_opens_nothing(proxy, until) -> None:
    made = proxy.database.transact(key_records.create, proxy.run_id, Power.ADMIN, "a guest", time.time() + 3600)
    with visitor(proxy) as client:
        signed_in(client, made.key)
        with proxy.database.write() as conn:
            past = {"expires_at": time.time() - 1, "changed_at": time.time()}
            conn.execute(update(keys).where(keys.c.id == made.id).values(**past))
        until(lambda: client.get("/ui/").status_code == 401)
        assert "the API key has expired" in client.get("/ui/").text
        assert client.post("/ui/sign-in", data={"key": made.key}).status_code == 401


def test_a_cookie_holds_no_key_and_is_accepted_by_another_replica(proxy, second) -> None:
    with visitor(proxy) as client:
        answer = client.post("/ui/sign-in", data={"key": "run-key"})
        assert "run-key" not in answer.headers["set-cookie"]
        for flag in ("HttpOnly", "SameSite=strict", "Path=/ui"):
            assert flag in answer.headers["set-cookie"]
        with visitor(second) as other:
            for name, value in client.cookies.items():
                other.cookies.set(name, value)
            assert other.get("/ui/runs/test").status_code == 200
