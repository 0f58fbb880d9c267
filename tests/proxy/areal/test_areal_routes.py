"""AReaL's routes, asked as its own clients ask: shapes, statuses, powers, and what they must not get wrong."""

import base64

import numpy as np
import openai
import pytest
from databases import KINDS
from sqlalchemy import select

from agentrl.store.audit import run_audit
from agentrl.store.tables import groups

from .areal_calls import ADMIN, HELLO, ask, bearer, end, export, model, reward, start, two_turns

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}


def _trajectories(conn):
    from agentrl.store.tables import trajectories

    found = select(groups.c.task, trajectories.c["return"], trajectories.c.reason).join(
        groups, groups.c.id == trajectories.c.group_id
    )
    return [tuple(row) for row in conn.execute(found)]


@pytest.mark.long_on("postgresql")
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


@pytest.mark.long_on("postgresql")
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


class TestAnyModel:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"model_aliases": ["*"]}}

    def test_any_model_may_be_named_where_the_run_says_so(self, proxy):
        session = start(proxy)
        for name in ("gpt-4o", "areal"):
            answer = model(proxy, session).chat.completions.create(model=name, messages=HELLO)
            assert answer.model == name


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

    @pytest.mark.long_on("postgresql")
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

    @pytest.mark.long_on("postgresql")
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
