"""Groups over HTTP: admission, evaluation, and groups of dead workers."""

import pytest
from databases import KINDS
from sqlalchemy import text

from agentrl.store import runs

from .played_sessions import play

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}


@pytest.mark.long_on("postgresql")
def test_a_group_becomes_ready_when_its_sessions_end(proxy):
    opened = proxy.post("/groups").json()
    assert opened["task"]["data"] in [{"n": i} for i in range(4)]
    assert [play(proxy, s)["status"] for s in opened["sessions"]] == ["completed", "completed"]
    run = proxy.get("/api/run")
    assert run["groups"] == {"ready": 1}
    assert run["trajectories"] == {"ready": 2}


@pytest.mark.long_on("postgresql")
def test_the_end_of_the_last_session_may_reject_the_group(proxy):
    first, second = proxy.post("/groups").json()["sessions"]
    play(proxy, first)
    play(proxy, second, reject_group="too easy")
    run = proxy.get("/api/run")
    assert (run["groups"], run["trajectories"]) == ({"rejected": 1}, {"rejected": 2})


@pytest.mark.long_on("postgresql")
def test_every_pass_over_the_data_visits_each_task_once(proxy):
    seen = []
    for _ in range(4):
        group = proxy.post("/groups").json()
        seen.append(group["task"]["data"]["n"])
        for session in group["sessions"]:
            proxy.http.delete(f"{proxy.url}/sessions/{session['session_id']}", headers=RUN)
    assert sorted(seen) == [0, 1, 2, 3]


def test_admission_answers_429_with_retry_after(proxy):
    for _ in range(4):
        assert proxy.post("/groups").status_code == 201
    refused = proxy.post("/groups")
    assert refused.status_code == 429
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == (
        "1",
        "500",
    )  # RFC 9110: whole seconds
    assert refused.json()["error"]["code"] == "no_capacity"


def test_a_finished_run_takes_no_groups(proxy):
    with proxy.database.write() as conn:
        runs.set_status(conn, proxy.run_id, "finished")
    refused = proxy.post("/groups")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "run_finished")


@pytest.mark.long_on("postgresql")
def test_evaluation_touches_neither_admission_nor_training_data(proxy):
    before = proxy.get("/api/run")
    session = proxy.session(metadata={"eval": "before", "setting": "sampled", "index": 3})
    play(proxy, session, 0.5)
    after = proxy.get("/api/run")
    assert {k: before[k] for k in ("admitted", "running", "returned", "trajectories")} == {
        k: after[k] for k in ("admitted", "running", "returned", "trajectories")
    }
    (row,) = proxy.get(f"/api/runs/{proxy.run_id}/evaluations/episodes")
    assert (row["eval"], row["setting"], row["index"], row["reward"]) == ("before", "sampled", 3, 0.5)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("asks", "ended"),
    [
        ("rollout-0/new", {"rollout-0/old", "rollout-0"}),
        ("rollout-0", {"rollout-0/old", "rollout-0/new", "rollout-0"}),
        ("rollout_0/new", set()),
        ("nobody", set()),
    ],
)
def test_a_restarted_worker_abandons_the_sessions_of_its_dead_processes(proxy, asks, ended):
    def statuses():
        return {owner: {proxy.get(f"/sessions/{i}")["status"] for i in ids} for owner, ids in started.items()}

    started = {}
    for owner in ("rollout-0/old", "rollout-0/new", "rollout-0", "rollout-00/old", None):
        group = proxy.post("/groups", {"owner": owner, "is_eval": True, "task": {}, "size": 2}).json()
        started[owner] = [session["session_id"] for session in group["sessions"]]
    assert proxy.post("/groups/abandon", {"owner": asks}).json() == {"abandoned": 2 * len(ended)}
    assert statuses() == {owner: {"abandoned" if owner in ended else "open"} for owner in started}


def test_groups_of_a_dead_worker_give_their_places_back(proxy):
    proxy.post("/groups", {"owner": "rollout-0/old"})
    assert proxy.post("/groups/abandon", {"owner": "rollout-0/new"}).json() == {"abandoned": 2}
    run = proxy.get("/api/run")
    assert (run["returned"], run["running"]) == (1, 0)


def test_a_run_without_tasks_has_no_groups(proxy):
    with proxy.database.write() as conn:
        conn.execute(text("DELETE FROM tasks"))
        conn.execute(text("DELETE FROM task_sources"))
    refused = proxy.post("/groups")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_tasks")
    assert proxy.post("/sessions").status_code == 201
    with proxy.database.read() as conn:
        run = runs.get(conn, proxy.run_id)
    assert (run.admitted, run.running) == (1, 1)
