"""Exports of AReaL's sessions: what they hold, and when they are answered."""

import threading

import pytest
from databases import KINDS

from .areal_calls import ADMIN, HELLO, ask, end, export, lists, reward, start

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


@pytest.mark.long_on("postgresql")
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


@pytest.mark.long_on("postgresql")
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

    @pytest.mark.long_on("postgresql")
    def test_an_export_waits_no_longer_than_a_call(self, proxy):
        session = start(proxy)
        early = proxy.post("/export_trajectories", {"session_id": session["session_id"]}, headers=ADMIN)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "session_open")


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
