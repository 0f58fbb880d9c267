"""Keys of AReaL's sessions: chosen, used again, and kept as hashes."""

import threading

import httpx
import pytest
from databases import KINDS
from sqlalchemy import select

from agentrl.proxy.access import authentication
from agentrl.store.db.codec import hash_key
from agentrl.store.tables import sessions

from .areal_calls import ADMIN, CHOSEN, ask, end, export, reward, start

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("chosen", [True, False])
def test_a_key_is_used_again_once_its_session_has_ended(proxy, second, chosen):
    """On every replica, also one that had served the key before; the earlier session stays as it was."""
    session = start(proxy, api_key=CHOSEN) if chosen else start(proxy)
    key = session["api_key"]
    for replica in (proxy, second):
        ask(replica, session)
    reward(proxy, session, 1.0)
    end(proxy, session)
    again = start(second, "8", api_key=key)
    assert again["api_key"] == key
    assert again["session_id"] != session["session_id"]
    for replica in (proxy, second):
        ask(replica, again)
    assert end(proxy, again).json()["interaction_count"] == 2
    assert len(export(proxy, session)) == len(export(proxy, again)) == 2
    assert [item["reward"] for item in export(proxy, session).values()] == [1.0, 1.0]


@pytest.mark.long_on("postgresql")
def test_a_start_with_the_key_of_an_open_session_ends_that_one(proxy, second):
    """AReaL's refresh: an agent that begins anew under its key."""
    session = start(proxy, api_key=CHOSEN)
    for replica in (proxy, second):
        ask(replica, session)
    reward(proxy, session, 0.5)
    again = start(second, "8", api_key=CHOSEN)
    assert proxy.get(f"/sessions/{session['session_id']}")["status"] == "completed"
    for replica in (proxy, second):
        ask(replica, again)
    assert proxy.get(f"/sessions/{again['session_id']}")["interactions"] == 2
    assert [item["reward"] for item in export(proxy, session).values()] == [0.5, 0.5]
    headers = ADMIN | {"Idempotency-Key": "once"}
    third = start(proxy, "9", headers=headers, api_key=CHOSEN)
    assert start(second, "9", headers=headers, api_key=CHOSEN) == third, "a repeated start ends nothing"
    assert proxy.get(f"/sessions/{third['session_id']}")["status"] == "open"


def test_the_store_keeps_a_chosen_key_as_a_hash(proxy):
    session = start(proxy, api_key=CHOSEN)
    ask(proxy, session)
    row = proxy.database.query(
        lambda conn: conn.execute(select(sessions).where(sessions.c.id == session["session_id"])).one()
    )
    assert CHOSEN not in str(row)
    assert hash_key(CHOSEN) == row.key_hash


@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("admin-key", 400),
        ("run-key", 400),
        ("with a space in the middle of it", 422),
        ("é" * 30, 422),
        (authentication.FIXED + "x" * 32, 400),
        ("x" * 201, 422),
    ],
)
def test_a_bad_choice_of_key_is_refused(proxy, key, status):
    refused = proxy.post("/rl/start_session", {"task_id": "7", "api_key": key}, headers=ADMIN)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"] == "api_key"


def test_a_short_key_is_accepted_and_an_empty_key_is_absent(proxy):
    assert start(proxy, api_key="k")["api_key"] == "k"
    assert len(start(proxy, api_key="")["api_key"]) > 30


class TestWithOwnRun:
    """Admission, and rows of the whole store."""

    @pytest.fixture
    def proxy(self, own_proxy):
        return own_proxy

    def test_a_repeated_start_takes_no_second_place(self, proxy, second):
        headers = ADMIN | {"Idempotency-Key": "once"}
        first = start(proxy, headers=headers, api_key=CHOSEN)
        assert start(second, headers=headers, api_key=CHOSEN) == first
        issued = start(proxy, headers=ADMIN | {"Idempotency-Key": "twice"})
        assert start(second, headers=ADMIN | {"Idempotency-Key": "twice"}) == issued
        assert proxy.get("/api/run")["admitted"] == 2

    def test_concurrent_starts_with_one_key_leave_one_open_session(self, proxy, second):
        answers = []

        def go(replica):
            with httpx.Client(timeout=120) as http:
                body = {"task_id": "7", "api_key": CHOSEN}
                answers.append(http.post(f"{replica.url}/rl/start_session", json=body, headers=ADMIN).status_code)

        threads = [threading.Thread(target=go, args=(replica,)) for replica in (proxy, second) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(answers) <= {200, 409}
        rows = proxy.database.query(lambda conn: conn.execute(select(sessions.c.status)).scalars().all())
        assert (rows.count("open"), len(rows)) == (1, answers.count(200))
