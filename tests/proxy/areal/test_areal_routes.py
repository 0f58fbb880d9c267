"""AReaL's routes, asked as its own clients ask: shapes, statuses, powers, and what they must not get wrong."""

import base64
import threading

import httpx
import numpy as np
import openai
import pytest
from databases import KINDS
from sqlalchemy import select

from agentrl.proxy.access import authentication
from agentrl.store.audit import run_audit
from agentrl.store.db.codec import hash_key
from agentrl.store.tables import groups, sessions

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
ADMIN = {"Authorization": "Bearer admin-key"}
RUN = {"Authorization": "Bearer run-key"}
CHOSEN = "a-key-that-somebody-chose-0123456789"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def start(proxy, task_id="7", headers=ADMIN, **more):
    answer = proxy.post("/rl/start_session", {"task_id": task_id, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"session_id", "api_key"}
    return answer.json()


def model(proxy, session, **options):
    """The SDK as AReaL sets it up: the proxy's own address and the session's key."""
    return openai.OpenAI(base_url=proxy.url, api_key=session["api_key"], max_retries=0, **options)


def ask(proxy, session, messages=HELLO, says="fine", **options):
    proxy.engine.enqueue(proxy.says(says))
    return model(proxy, session).chat.completions.create(model="default", messages=messages, **options)


def end(proxy, session):
    return proxy.post("/rl/end_session", headers=bearer(session["api_key"]))


def reward(proxy, session, value, call=None, **headers):
    body = {"interaction_id": call, "reward": value}
    return proxy.post("/rl/set_reward", body, headers=bearer(session["api_key"]) | headers)


def export(proxy, session, **options):
    answer = proxy.post("/export_trajectories", {"session_id": session["session_id"], **options}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()["interactions"]


def lists(proxy, session, **options):
    return export(proxy, session, encoding="list", **options)


def two_turns(proxy, session):
    first = ask(proxy, session)
    talk = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
    return first, ask(proxy, session, talk)


def _trajectories(conn):
    from agentrl.store.tables import trajectories

    found = select(groups.c.task, trajectories.c["return"], trajectories.c.reason).join(
        groups, groups.c.id == trajectories.c.group_id
    )
    return [tuple(row) for row in conn.execute(found)]


def test_the_model_is_served_under_areals_paths_in_every_dialect(proxy):
    session = start(proxy)
    sdk = model(proxy, session)
    sdk.chat.completions.create(model="default", messages=HELLO)
    streamed = sdk.chat.completions.create(model="default", messages=HELLO, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in streamed if chunk.choices][-1] is not None
    sdk.responses.create(model="default", input="hello")
    sdk.completions.create(model="default", prompt="hello")
    body = {"model": "default", "max_tokens": 8, "messages": HELLO}
    assert proxy.post("/v1/messages", body, headers={"x-api-key": session["api_key"]}).status_code == 200
    assert [call["dialect"] for call in proxy.calls(session)] == [
        "openai.chat",
        "openai.chat",
        "openai.responses",
        "openai.completions",
        "anthropic.messages",
    ]
    end(proxy, session)
    assert [name.partition("-")[0].partition("_")[0] for name in export(proxy, session)] == [
        "chatcmpl",
        "chatcmpl",
        "resp",
        "cmpl",
        "msg",
    ]
    with pytest.raises(openai.ConflictError):
        sdk.chat.completions.create(model="default", messages=HELLO)


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


def test_fields_that_are_not_known_are_ignored(proxy):
    session = start(proxy, "7", model="policy", online=True)
    ask(proxy, session)
    body = {"reward": 1.0, "model": "policy", "whatever": [1]}
    assert proxy.post("/rl/set_reward", body, headers=bearer(session["api_key"])).status_code == 200
    ended = proxy.post("/rl/end_session", {"reason": "done"}, headers=bearer(session["api_key"]))
    assert ended.json()["interaction_count"] == 1
    assert len(export(proxy, session, node="a")) == 1


def test_every_route_refuses_a_key_of_lower_power(proxy):
    session = start(proxy)
    ask(proxy, session)
    bodies = {
        "/grant_capacity": {},
        "/rl/start_session": {"task_id": "7"},
        "/export_trajectories": {"session_id": session["session_id"]},
        "/rl/set_reward": {"reward": 1.0},
        "/rl/end_session": {},
    }
    for path, body in bodies.items():
        assert proxy.http.post(proxy.url + path, json=body).status_code == 401
        wrong = proxy.post(path, body, headers=bearer("areal-admin-key"))  # AReaL's default key
        assert wrong.status_code == 401
        assert wrong.json()["detail"] == wrong.json()["error"]["message"]
    for path in ("/grant_capacity", "/rl/start_session", "/export_trajectories"):
        assert proxy.post(path, bodies[path], headers=bearer(session["api_key"])).status_code == 403
    for path in ("/rl/set_reward", "/rl/end_session"):
        assert proxy.post(path, bodies[path], headers=RUN).status_code == 403  # names no session
        assert proxy.post(path, bodies[path], headers=RUN | {"X-Session-ID": session["session_id"]}).status_code == 200
    for path in ("/grant_capacity", "/rl/start_session", "/export_trajectories"):
        assert proxy.post(path, bodies[path], headers=RUN).status_code == 200


def test_rewards_are_of_calls_of_the_session_and_survive_being_repeated(proxy):
    session, other = start(proxy), start(proxy)
    early = reward(proxy, session, 1.0)
    assert (early.status_code, early.json()["error"]["code"]) == (400, "no_interactions")
    first, last = two_turns(proxy, session)
    stranger = ask(proxy, other)
    for wrong in (stranger.id, "chatcmpl-none"):
        assert reward(proxy, session, 1.0, wrong).status_code == 400
    for value in (0.1, 0.25, 0.25):  # a later one counts, a repeated one changes nothing
        reward(proxy, session, value, first.id)
    for _ in range(2):
        reward(proxy, session, 0.5, last.id, **{"Idempotency-Key": "k"})
    end(proxy, session)
    assert [item["reward"] for item in export(proxy, session).values()] == [0.75, 0.5]
    assert [item["reward"] for item in export(proxy, session, discount=0.5).values()] == [0.5, 0.5]
    assert proxy.post("/rl/set_reward", {"reward": "much"}, headers=bearer(session["api_key"])).status_code == 422


def test_a_reward_without_an_id_is_the_last_call_s_and_no_later_one_s(proxy):
    """An agent that rewards turn by turn: a call that follows is not paid for what came before it."""
    session = start(proxy)
    first = ask(proxy, session)
    reward(proxy, session, 1.0)
    talk = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
    ask(proxy, session, talk)
    end(proxy, session)
    assert [item["reward"] for item in export(proxy, session).values()] == [1.0, 0.0]
    (given,) = proxy.get(f"/sessions/{session['session_id']}/rewards")
    assert (given["interaction_id"], given["scope"]) == (first.id.removeprefix("chatcmpl-"), "call")


def test_a_side_call_that_comes_last_does_not_take_the_reward(proxy):
    session = start(proxy)
    first = ask(proxy, session)
    ask(proxy, session, [{"role": "user", "content": "a title"}], extra_headers={"X-Turn-Type": "side"})
    reward(proxy, session, 1.0)
    (given,) = proxy.get(f"/sessions/{session['session_id']}/rewards")
    assert given["interaction_id"] == first.id.removeprefix("chatcmpl-")


def test_a_call_that_is_not_to_be_stored_is_kept_out(proxy):
    """Of training, of exports, of the count, and of the reward; it is recorded all the same."""
    session = start(proxy)
    first = ask(proxy, session)
    ask(proxy, session, [{"role": "user", "content": "judge this"}], store=False)
    model(proxy, session).responses.create(model="default", input="and this", store=False)
    ask(proxy, session, [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}], store=True)
    reward(proxy, session, 1.0)
    assert end(proxy, session).json()["interaction_count"] == 2
    assert len(export(proxy, session)) == 2
    assert len(export(proxy, session, style="concat")) == 1
    calls = proxy.calls(session)
    assert [call["trainable"] for call in calls] == [True, False, False, True]
    assert [call["role"] for call in calls] == ["main", "side", "side", "main"]
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


def test_outside_of_areals_routes_store_false_has_no_effect(proxy):
    """Many SDKs send it with every call."""
    session = start(proxy)
    sdk = openai.OpenAI(base_url=proxy.url + "/v1", api_key=session["api_key"], max_retries=0)
    sdk.chat.completions.create(model="default", messages=HELLO, store=False)
    assert [call["trainable"] for call in proxy.calls(session)] == [True]


def test_rewards_turn_by_turn_add_up_and_a_failed_call_gets_none(proxy):
    from agentrl.testing import Reply

    session = start(proxy)
    first = ask(proxy, session)
    reward(proxy, session, 0.25)
    proxy.engine.enqueue(Reply(error="no"))
    with pytest.raises(openai.APIStatusError):
        model(proxy, session).chat.completions.create(model="default", messages=HELLO)
    reward(proxy, session, 0.5)  # after the same delivered call: a correction
    talk = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
    ask(proxy, session, talk)
    reward(proxy, session, 1.0)
    assert end(proxy, session).json()["interaction_count"] == 2
    assert [item["reward"] for item in lists(proxy, session, style="concat").values()] == [1.5]


def test_an_end_can_be_repeated_and_a_late_reward_is_not_applied(proxy):
    session = start(proxy)
    ask(proxy, session)
    assert end(proxy, session).json() == end(proxy, session).json()
    late = reward(proxy, session, 1.0).json()
    assert (late["message"], late["applied"]) == ("success", False)


def test_concat_trains_shared_tokens_once_and_keeps_every_reward(proxy):
    """AReaL exports only leaves, each with the loss of all that led to it and with its own reward alone."""
    session = start(proxy)
    first = ask(proxy, session, says="one")
    for more in ("two", "three"):
        ask(proxy, session, [*HELLO, first.choices[0].message, {"role": "user", "content": more}], says=more)
    reward(proxy, session, 0.25, first.id)
    reward(proxy, session, 1.0)
    end(proxy, session)
    leaves = lists(proxy, session, style="concat")
    assert list(leaves) == [f"chatcmpl-{call['id']}" for call in proxy.calls(session)[1:]]
    outputs = [len(call["output_ids"]) for call in proxy.calls(session)]
    trained = [sum(item["tensor_dict"]["loss_mask"][0]) for item in leaves.values()]
    assert trained == [outputs[0] + outputs[1], outputs[2]]
    assert [item["tensor_dict"]["rewards"] for item in leaves.values()] == [[1.25], [1.25]]
    assert [item["turn_returns"] for item in leaves.values()] == [[1.25, 1.0], [1.25, 1.0]]
    each = lists(proxy, session)
    assert [sum(item["tensor_dict"]["loss_mask"][0]) for item in each.values()] == outputs
    for item in each.values():
        arrays = item["tensor_dict"]
        prompt = [i for i, sampled in enumerate(arrays["loss_mask"][0]) if not sampled]
        assert {arrays["versions"][0][i] for i in prompt} == {-1}
        assert {arrays["logprobs"][0][i] for i in prompt} == {0.0}
        assert set(arrays["attention_mask"][0]) == {True}


def test_an_export_names_its_session_and_waits_for_its_end(proxy, second):
    session = start(proxy)
    ask(proxy, session)
    reward(proxy, session, 1.0)
    body = {"session_id": session["session_id"]}
    assert proxy.post("/export_trajectories", {"session_id": "none"}, headers=ADMIN).status_code == 404
    assert proxy.post("/export_trajectories", body | {"style": "merged"}, headers=ADMIN).status_code == 422
    wrong: list[dict[str, object]] = [{}, body | {"session_ids": ["a"]}, {"session_ids": []}]
    for names in wrong:
        assert proxy.post("/export_trajectories", names, headers=ADMIN).status_code == 422
    found = []
    waiting = threading.Thread(target=lambda: found.append(export(second, session)))
    waiting.start()
    assert not found
    end(proxy, session)
    waiting.join(120)
    assert found == [export(proxy, session)]  # nothing is used up
    assert start(proxy)["session_id"] != session["session_id"]


class TestPatience:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"request_timeout_s": 0.2}}

    def test_an_export_waits_no_longer_than_a_call(self, proxy):
        session = start(proxy)
        early = proxy.post("/export_trajectories", {"session_id": session["session_id"]}, headers=ADMIN)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "session_open")


class TestAnyModel:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"model_aliases": ["*"]}}

    def test_any_model_may_be_named_where_the_run_says_so(self, proxy):
        session = start(proxy)
        for name in ("gpt-4o", "areal"):
            answer = model(proxy, session).chat.completions.create(model=name, messages=HELLO)
            assert answer.model == name


def test_an_export_that_removes_nothing_leaves_sessions_open(proxy):
    (one,) = proxy.post("/rl/start_session", {"task_id": "1", "group_size": 0}, headers=ADMIN).json()["sessions"]
    session = {"session_id": one["session_id"], "api_key": one["session_api_key"]}
    ask(proxy, session)
    body = {"session_ids": [session["session_id"]], "remove_session": False}
    assert proxy.post("/export_trajectories", body, headers=ADMIN).json()["interactions"] == {}
    reward(proxy, session, 1.0)
    assert len(proxy.post("/export_trajectories", body, headers=ADMIN).json()["interactions"]) == 1
    assert proxy.get(f"/sessions/{session['session_id']}")["status"] == "open"


def test_a_session_without_calls_has_an_empty_export(proxy):
    session = start(proxy)
    assert end(proxy, session).json() == {"message": "success", "interaction_count": 0}
    assert export(proxy, session) == export(proxy, session, style="concat") == {}


class TestWithOwnRun:
    """Admission, and rows of the whole store."""

    @pytest.fixture
    def proxy(self, own_proxy):
        return own_proxy

    def test_an_episode_follows_areals_runner(self, proxy):
        """grant, start, agent, reward, end, export."""
        assert proxy.http.post(f"{proxy.url}/grant_capacity", headers=ADMIN).json() == {"capacity": 4}
        session = start(proxy)
        first, last = two_turns(proxy, session)
        assert reward(proxy, session, 1.0).json() == {
            "message": "success",
            "applied": True,
            "interaction_count": 2,
            "session_id": session["session_id"],
            "trajectory_id": 0,
            "trajectory_ready": True,
            "ready_transition": True,
        }
        assert end(proxy, session).json() == {"message": "success", "interaction_count": 2}
        exported = export(proxy, session)
        assert list(exported) == [first.id, last.id]
        item = exported[last.id]
        assert {"tensor_dict", "reward", "interaction_id"} <= set(item)
        assert (item["reward"], item["interaction_id"]) == (1.0, last.id)
        arrays = {
            name: np.frombuffer(base64.b64decode(t["data"]), t["dtype"].removeprefix("torch.")).reshape(t["shape"])
            for name, t in item["tensor_dict"].items()
        }
        call = proxy.calls(session)[1]
        sampled = len(call["output_ids"])
        assert arrays["input_ids"].shape == arrays["attention_mask"].shape == (1, arrays["loss_mask"].size)
        assert arrays["input_ids"][0, -sampled:].tolist() == call["output_ids"]
        assert np.allclose(arrays["logprobs"][0, -sampled:], call["logprobs"])
        assert arrays["rewards"].tolist() == [1.0]
        assert {t["type"] for t in item["tensor_dict"].values()} == {"tensor"}

    def test_grant_capacity_reports_the_capacity_of_admission(self, proxy):
        """AReaL's permits live in one process and know no staleness; here they are what admission says, everywhere."""
        for left in (4, 3, 2, 1):
            assert proxy.post("/grant_capacity", headers=ADMIN).json() == {"capacity": left}
            start(proxy)
        for _ in range(3):
            assert proxy.post("/grant_capacity", headers=ADMIN).json() == {"capacity": 0}
        refused = proxy.post("/rl/start_session", {"task_id": "7"}, headers=ADMIN)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "no capacity" in refused.json()["detail"]
        assert refused.json()["error"]["code"] == "no_capacity"

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

    def test_a_group_of_sessions_follows_areals_inference_service(self, proxy, second):
        """start with group_size, rewards, one export of all, which ends them: one group here, compared with itself."""
        body = {"task_id": "12", "group_size": 3}
        answer = proxy.post("/rl/start_session", body, headers=ADMIN)
        assert answer.status_code == 201, answer.text
        started = answer.json()
        group = [{"session_id": s["session_id"], "api_key": s["session_api_key"]} for s in started["sessions"]]
        assert len({s["api_key"] for s in group}) == 3
        assert proxy.get("/api/run")["admitted"] == 1
        for i, session in enumerate(group[:2]):
            ask(proxy, session)
            assert reward(proxy, session, float(i)).json()["trajectory_id"] == 0
        ask(second, group[2])
        body = {
            "session_ids": [s["session_id"] for s in group] + ["unknown"],
            "group_id": started["group_id"],
            "trajectory_id": None,
            "discount": 1.0,
            "style": "individual",
            "remove_session": True,
        }
        exported = second.post("/export_trajectories", body, headers=ADMIN).json()["interactions"]
        assert [item["reward"] for item in exported.values()] == [0.0, 1.0], "one had no reward"
        statuses = [proxy.get(f"/sessions/{s['session_id']}")["status"] for s in group]
        assert statuses == ["completed", "completed", "abandoned"]
        assert proxy.get("/api/run")["groups"] == {"ready": 1}
        assert proxy.post("/export_trajectories", body, headers=ADMIN).json()["interactions"] == exported
        other = proxy.post("/export_trajectories", body | {"trajectory_id": 1}, headers=ADMIN)
        assert other.json()["interactions"] == {}

    def test_a_recorded_session_becomes_a_trajectory(self, proxy):
        session = start(proxy, "task-9")
        two_turns(proxy, session)
        reward(proxy, session, 0.5)
        end(proxy, session)
        (trajectory,) = proxy.database.query(_trajectories)
        assert trajectory == (
            {"task_id": "task-9"},
            0.5,
            "group_too_small",
        )  # the test's run wants two episodes a group
        with proxy.database.read() as conn:
            assert list(run_audit.scan(conn, proxy.run_id)) == []
