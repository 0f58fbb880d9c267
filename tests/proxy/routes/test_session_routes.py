"""Sessions over HTTP: their ends, rewards, and bodies that are refused."""

import pytest
from databases import KINDS

from .played_sessions import ADMIN, play

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}
JSON = {"Content-Type": "application/json"}


@pytest.mark.long_on("postgresql")
def test_an_end_may_reject_a_session_or_train_some_tokens_only(proxy):
    first, second = proxy.post("/groups").json()["sessions"]
    path = f"/sessions/{first['session_id']}/end"
    reply = proxy.sdk(first).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    for wrong in ({"x": [[0, 1]]}, {"x": [[1]]}, {"x": [[-1, 1]]}, {"x": "all"}):
        assert proxy.post(path, {"trained_tokens": wrong}).status_code == 422
    assert proxy.post(path, {"trained_tokens": {reply.id: [[0, 1]]}}).json()["status"] == "completed"
    play(proxy, second, reject="too easy")
    assert proxy.get("/api/run")["trajectories"] == {"rejected": 2}


@pytest.mark.long_on("postgresql")
def test_an_end_may_carry_what_the_agent_measured(proxy):
    session, other = proxy.post("/groups").json()["sessions"]
    path = f"/sessions/{session['session_id']}/end"
    most = {f"name {i}": 0.0 for i in range(33)}
    for wrong in ({"a": "x"}, {"a": None}, {"a": 1e101}, {"": 1.0}, {"a" * 101: 1.0}, {"a\n": 1.0}, most, [1.0]):
        answer = proxy.post(path, {"stats": wrong})
        assert answer.status_code == 422, wrong
        assert "stats" in answer.json()["error"]["message"]
    for number in ("NaN", "Infinity", "1e999"):  # JSON as Python writes it
        content = f'{{"stats": {{"a": {number}}}}}'
        assert proxy.http.post(proxy.url + path, content=content, headers=RUN | JSON).status_code in (400, 422)
    assert proxy.post(path, {"stats": {"turns": 3, "time/tool": 0.25}}).status_code == 200
    assert proxy.post(path, {"stats": {"turns": 99}}).status_code == 200  # the first end stands
    assert proxy.get(f"/sessions/{session['session_id']}")["stats"] == {"turns": 3.0, "time/tool": 0.25}
    assert proxy.get(f"/sessions/{other['session_id']}")["stats"] == {}


@pytest.mark.long_on("postgresql")
def test_the_end_of_a_session_may_have_an_answer(proxy):
    first, second = proxy.post("/groups").json()["sessions"]
    play(proxy, first, answer="the\n  answer\0")
    play(proxy, second, answer="x" * 60_000)
    assert proxy.get(f"/sessions/{first['session_id']}")["answer"] == "the answer"
    kept = proxy.get(f"/sessions/{second['session_id']}")["answer"]
    assert kept[:402] == "x" * 400 + "… "
    assert len(kept) <= 500
    third = proxy.post("/groups").json()["sessions"][0]
    path = f"/sessions/{third['session_id']}/end"
    assert proxy.post(path, {"answer": "x" * 70_000}).status_code == 422
    assert proxy.post(path, {"answer": 4}).status_code == 422


def test_a_repeated_reward_counts_once(proxy):
    session = proxy.session()
    path = f"/sessions/{session['session_id']}"
    first = proxy.post(f"{path}/reward", {"value": 1.0, "idempotency_key": "k"}).json()
    assert proxy.post(f"{path}/reward", {"value": 1.0, "idempotency_key": "k"}).json() == first
    assert len(proxy.get(path)["rewards"]) == 1


@pytest.mark.long_on("postgresql")
def test_a_reward_names_its_call_by_completion_id(proxy):
    session = proxy.session()
    answer = proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    path = f"/sessions/{session['session_id']}/reward"
    assert proxy.post(path, {"value": 1.0, "interaction_id": answer.id}).json()["applied"]
    assert proxy.post(path, {"value": 1.0, "interaction_id": "chatcmpl-none"}).status_code == 404


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("body", [{"value": "much"}, {"valu": 1}, {"value": 1, "name": "x" * 101}])
def test_bad_rewards_are_refused_by_name(proxy, body):
    session = proxy.session()
    answer = proxy.post(f"/sessions/{session['session_id']}/reward", body)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] in ("value", "valu", "name")


ODD = (b'"\\ud800"', b'"\\u0000"', b"NaN", b"1e999", b"9" * 400, b"[" * 300 + b"]" * 300, b"[" * 5000)


def test_values_that_no_database_stores_are_refused_or_read_back(proxy):
    """Half characters, NUL, NaN, integers without end, deep nests: in text, in JSON and in URLs."""
    for odd in ODD:
        for path, body in (
            ("/heartbeat", b'{"owner": %s}'),
            ("/groups", b'{"is_eval": true, "task": {"x": %s}}'),
            ("/groups", b'{"is_eval": true, "task": {}, "metadata": {"x": %s}}'),
            ("/sessions", b'{"metadata": {"x": %s}}'),
            ("/sessions", b'{"parent_session_id": %s}'),
            ("/admin/publish", b'{"version": %s}'),
        ):
            answer = proxy.http.post(proxy.url + path, content=body % odd, headers=ADMIN | JSON)
            assert answer.status_code in (200, 201, 400, 404, 422), answer.text
            for opened in answer.json().get("sessions", [answer.json()] if answer.status_code == 201 else []):
                proxy.get(f"/sessions/{opened['session_id']}")
                proxy.http.delete(f"{proxy.url}/sessions/{opened['session_id']}", headers=RUN)
    for path in (
        "/sessions/%00",
        "/api/runs/%00/steps",
        "/api/runs/x/events?kind=%00",
        "/api/runs/x/steps/9999999999/lineage",
    ):
        assert proxy.http.get(proxy.url + path, headers=RUN).status_code in (200, 400, 404, 422)


@pytest.mark.long_on("postgresql")
def test_a_session_without_reward_is_rejected_and_gives_its_place_back(proxy):
    group = proxy.post("/groups").json()
    for session in group["sessions"]:
        proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
        proxy.post(f"/sessions/{session['session_id']}/end")
    run = proxy.get("/api/run")
    assert (run["admitted"], run["returned"], run["running"]) == (1, 1, 0)
    assert run["trajectories"] == {"rejected": 2}


@pytest.mark.long_on("postgresql")
def test_a_body_is_json_whatever_its_content_type_says(proxy):
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d` sends
    opened = proxy.http.post(f"{proxy.url}/sessions", content='{"task": {"n": 1}}', headers=RUN | form)
    assert opened.status_code == 201, opened.text
    session = opened.json()["session_id"]
    rewarded = proxy.http.post(f"{proxy.url}/sessions/{session}/reward", content='{"value": 1}', headers=RUN | form)
    assert rewarded.status_code == 200


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param("task=1", marks=pytest.mark.long),
        "{",
        pytest.param("", marks=pytest.mark.long),
        "[" * 100_000,
        b"\xff",
    ],
)
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/json"])
def test_a_body_that_is_not_json_is_a_400(proxy, body, kind):
    refused = proxy.http.post(f"{proxy.url}/sessions", content=body, headers=RUN | {"Content-Type": kind})
    error = refused.json()["error"]
    if body == "":
        assert (refused.status_code, error["message"]) == (422, "the body: Field required")
    else:
        assert refused.status_code == 400, refused.text
