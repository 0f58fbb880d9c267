"""Groups, sessions, rewards, publishing and restarts, over HTTP."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from databases import KINDS
from sqlalchemy import text

from agentrl.domain.schemas import InteractionStatus, TrainedBatch, TrainedTrajectory
from agentrl.engine.server_process import free_port
from agentrl.proxy.engines import pool
from agentrl.proxy.engines.pool import EnginePool
from agentrl.store import runs
from agentrl.store.db import codec
from agentrl.store.tables import interactions as interactions_table
from agentrl.store.training import steps, trainer_epochs
from agentrl.testing import FakeEngine

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}
ADMIN = {"Authorization": "Bearer admin-key"}
JSON = {"Content-Type": "application/json"}


def play(proxy, session, value=1.0, **end):
    """A whole rewarded episode."""
    proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    path = f"/sessions/{session['session_id']}"
    assert proxy.post(f"{path}/reward", {"value": value}).status_code == 200
    return proxy.post(f"{path}/end", end).json()


def test_a_group_becomes_ready_when_its_sessions_end(proxy):
    opened = proxy.post("/groups").json()
    assert opened["task"]["data"] in [{"n": i} for i in range(4)]
    assert [play(proxy, s)["status"] for s in opened["sessions"]] == ["completed", "completed"]
    run = proxy.get("/api/run")
    assert run["groups"] == {"ready": 1}
    assert run["trajectories"] == {"ready": 2}


def test_an_end_may_reject_a_session_or_train_some_tokens_only(proxy):
    first, second = proxy.post("/groups").json()["sessions"]
    path = f"/sessions/{first['session_id']}/end"
    reply = proxy.sdk(first).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    for wrong in ({"x": [[0, 1]]}, {"x": [[1]]}, {"x": [[-1, 1]]}, {"x": "all"}):
        assert proxy.post(path, {"trained_tokens": wrong}).status_code == 422
    assert proxy.post(path, {"trained_tokens": {reply.id: [[0, 1]]}}).json()["status"] == "completed"
    play(proxy, second, reject="too easy")
    assert proxy.get("/api/run")["trajectories"] == {"rejected": 2}


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


def test_the_end_of_the_last_session_may_reject_the_group(proxy):
    first, second = proxy.post("/groups").json()["sessions"]
    play(proxy, first)
    play(proxy, second, reject_group="too easy")
    run = proxy.get("/api/run")
    assert (run["groups"], run["trajectories"]) == ({"rejected": 1}, {"rejected": 2})


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


def test_a_repeated_reward_counts_once(proxy):
    session = proxy.session()
    path = f"/sessions/{session['session_id']}"
    first = proxy.post(f"{path}/reward", {"value": 1.0, "idempotency_key": "k"}).json()
    assert proxy.post(f"{path}/reward", {"value": 1.0, "idempotency_key": "k"}).json() == first
    assert len(proxy.get(path)["rewards"]) == 1


def test_a_reward_names_its_call_by_completion_id(proxy):
    session = proxy.session()
    answer = proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    path = f"/sessions/{session['session_id']}/reward"
    assert proxy.post(path, {"value": 1.0, "interaction_id": answer.id}).json()["applied"]
    assert proxy.post(path, {"value": 1.0, "interaction_id": "chatcmpl-none"}).status_code == 404


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


def test_a_session_without_reward_is_rejected_and_gives_its_place_back(proxy):
    group = proxy.post("/groups").json()
    for session in group["sessions"]:
        proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
        proxy.post(f"/sessions/{session['session_id']}/end")
    run = proxy.get("/api/run")
    assert (run["admitted"], run["returned"], run["running"]) == (1, 1, 0)
    assert run["trajectories"] == {"rejected": 2}


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


def trained_version(proxy, tmp_path):
    """Two ready groups, leased and completed as version 1, not yet published."""
    for _ in range(2):
        for session in proxy.post("/groups").json()["sessions"]:
            play(proxy, session)
    with proxy.database.write() as conn:
        epoch = trainer_epochs.begin_epoch(conn, proxy.run_id)
        step_id = steps.lease(conn, proxy.run_id, epoch, step=1, n_groups=2, max_staleness=1, discount=1.0)
        batch = steps.batch(conn, step_id)
        facts = TrainedBatch(
            step_id=step_id,
            digest=batch.digest(),
            estimator="grpo",
            wasted_tokens=0,
            trained=[
                TrainedTrajectory(
                    trajectory_id=t.trajectory_id, advantage=0.5, staleness_max=0, staleness_mean=0.0, tokens_trained=4
                )
                for t in batch.trajectories
            ],
        )
        steps.complete(
            conn, proxy.run_id, epoch, facts, metrics={"loss": 0.5}, version=1, path=str(tmp_path), checksum="c"
        )


def test_a_publish_moves_the_run_once_every_engine_has_the_version(proxy, tmp_path):
    trained_version(proxy, tmp_path)
    answer = proxy.post("/admin/publish", {"version": 1}, headers=ADMIN).json()
    assert answer["version"] == 1
    assert list(answer["stall_s"]) == [proxy.engine.url]
    assert proxy.engine.version == "1"
    assert not proxy.engine.paused
    run = proxy.get("/api/run")
    assert (run["current_version"], run["published_step"]) == (1, 1)
    (step,) = proxy.get(f"/api/runs/{proxy.run_id}/steps")
    assert (step["state"], step["trajectories"], step["metrics"]) == ("published", 4, {"loss": 0.5})
    lineage = proxy.get(f"/api/runs/{proxy.run_id}/steps/1/lineage")
    assert len({row["trajectory_id"] for row in lineage}) == 4
    assert {(row["return"], row["advantage"], row["staleness_max"]) for row in lineage} == {(1.0, 0.5, 0)}


def test_a_trajectory_is_read_token_by_token(proxy, tmp_path):
    trained_version(proxy, tmp_path)
    lineage = proxy.get(f"/api/runs/{proxy.run_id}/steps/1/lineage")
    of_run = f"/api/runs/{proxy.run_id}/trajectories"
    one = proxy.get(f"{of_run}/{lineage[0]['trajectory_id']}/tokens")
    assert (one["step"], one["state"]) == (1, "trained")
    assert [reason for reason, _, _ in one["loss_reasons"]] == ["prompt", "trained"]
    assert one["loss_reasons"][-1][2] == len(one["input_ids"]) == len(one["versions"]) == len(one["ages"])
    assert set(one["entropy"]) == {None}  # no trainer has measured it
    for path in (f"{of_run}/nothing/tokens", f"/api/runs/nothing/trajectories/{one['trajectory_id']}/tokens"):
        unknown = proxy.http.get(f"{proxy.url}{path}", headers=ADMIN)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "trajectory_not_found")


def test_an_engine_that_refuses_the_weights_is_ejected_and_comes_back(proxy, tmp_path):
    trained_version(proxy, tmp_path)
    proxy.engine.fail_next_update = "out of memory"
    refused = proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "publish_failed")
    assert proxy.post("/admin/publish", {"version": 1}, headers=ADMIN).status_code == 200
    assert proxy.get("/api/engines")[0]["state"] == "serving"


def test_two_replicas_that_publish_at_once_update_an_engine_once(proxy, second, tmp_path, until):
    """One changes its weights; the other waits, and then finds nothing to do."""
    trained_version(proxy, tmp_path)
    proxy.engine.update_takes_s = 0.5
    with ThreadPoolExecutor() as threads:
        first = threads.submit(proxy.post, "/admin/publish", {"version": 1}, headers=ADMIN)
        until(lambda: proxy.get("/api/engines")[0]["updater"] == "test-replica")
        other = threads.submit(second.post, "/admin/publish", {"version": 1}, headers=ADMIN)
        answers = [first.result(), other.result()]
    assert [list(answer.json()["transport"].values()) for answer in answers] == [["disk"], ["none"]]
    changes = [path for path, _ in proxy.engine.calls if "pause" in path or "update" in path or "continue" in path]
    assert changes == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    (row,) = proxy.get("/api/engines")
    assert (row["updater"], row["version"], proxy.engine.version) == (None, 1, "1")


def updates(proxy):
    """The versions that the engine was told to load, in order."""
    return [body["weight_version"] for path, body in proxy.engine.calls if path == "/update_weights_from_disk"]


@pytest.fixture
def probed(monkeypatch, until):
    """Wait until the engines were asked so many times for their version."""
    asked = []
    ask = EnginePool.probe

    async def counted(pool, engine):
        await ask(pool, engine)
        asked.append(engine)

    monkeypatch.setattr(EnginePool, "probe", counted)
    monkeypatch.setattr(pool, "WATCH_EVERY_S", 0.05)

    def wait(times):
        seen = len(asked)
        until(lambda: len(asked) >= seen + times)

    return wait


def test_a_publish_of_one_replica_is_not_undone_by_another(proxy, second, probed, tmp_path, until):
    trained_version(proxy, tmp_path)
    probed(4)
    assert proxy.post("/admin/publish", {"version": 1}, headers=ADMIN).status_code == 200
    probed(4)
    assert (updates(proxy), proxy.engine.version) == (["1"], "1")
    proxy.engine.stop()
    proxy.engine.start()  # base weights: both bring it to the run's version, which only one of them published
    until(lambda: proxy.engine.version == "1")
    probed(4)
    assert set(updates(proxy)) == {"1"}


def test_a_version_that_is_being_published_is_not_undone(proxy, probed, tmp_path, until):
    """Another replica has brought it to this engine, and is busy with the next one."""
    trained_version(proxy, tmp_path)
    proxy.engine.version = "1"
    probed(3)
    assert (updates(proxy), proxy.engine.version) == ([], "1")
    with proxy.database.write() as conn:
        conn.execute(text("UPDATE weight_versions SET state = 'rolled_back' WHERE version = 1"))
    until(lambda: proxy.engine.version == "0")


def test_an_older_version_that_takes_a_rolled_back_ones_place_is_not_undone(proxy, probed, tmp_path):
    trained_version(proxy, tmp_path)
    proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    with proxy.database.write() as conn:
        conn.execute(text("UPDATE weight_versions SET state = 'rolled_back' WHERE version = 1"))
    proxy.engine.version = "0"  # another replica has begun
    probed(3)
    assert (updates(proxy), proxy.engine.version) == (["1"], "0")


def test_a_restarted_engine_is_brought_to_the_runs_version(proxy, tmp_path, until):
    trained_version(proxy, tmp_path)
    proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    proxy.engine.stop()
    proxy.engine.start()  # base weights, version 0
    until(lambda: proxy.engine.version == "1")


def test_a_restarted_proxy_carries_on(proxy, serve, store_url, tmp_path, until):
    trained_version(proxy, tmp_path)
    session = proxy.session()
    first = proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    with proxy.database.write() as conn:  # a call that the proxy died over
        row = conn.execute(interactions_table.select().limit(1)).one()
        lost = codec.new_id()
        conn.execute(
            interactions_table.insert().values(
                **{**row._mapping, "id": lost, "status": InteractionStatus.RUNNING, "replica": "test-replica"}
            )
        )
    port = free_port()
    with serve(store_url, [proxy.engine.url], port):
        url = f"http://127.0.0.1:{port}"
        with proxy.database.read() as conn:
            status = conn.execute(interactions_table.select().where(interactions_table.c.id == lost)).one()
        assert status.status == InteractionStatus.LOST
        until(lambda: proxy.engine.version == "1")  # it finishes the publish that nobody asked for
        moved = {**session, "base_url": f"{url}/sessions/{session['session_id']}/v1"}
        messages = [
            {"role": "user", "content": "ab"},
            first.choices[0].message.model_dump(),
            {"role": "user", "content": "c"},
        ]
        proxy.sdk(moved).chat.completions.create(model="test", messages=messages)
    delivered = [call for call in proxy.calls(session) if call["status"] == "complete"]
    assert [call["bridged"] for call in delivered] == [False, True]


def test_openapi_documents_the_monitoring_routes(proxy):
    paths = proxy.http.get(f"{proxy.url}/openapi.json").json()["paths"]
    wanted = {
        "/api/runs",
        "/api/runs/{run_id}",
        "/api/runs/{run_id}/steps",
        "/api/sessions/{session_id}",
        "/api/engines",
    }
    assert wanted <= paths.keys()
    assert all(paths[path]["get"]["description"] for path in wanted)


def test_monitoring_needs_a_run_key(proxy):
    session = proxy.session()
    for headers, status in [({}, 401), ({"x-api-key": session["api_key"]}, 403), (RUN, 200)]:
        assert proxy.http.get(f"{proxy.url}/api/runs", headers=headers).status_code == status
    body = proxy.http.get(f"{proxy.url}/api/runs", headers=RUN).text
    assert "key_hash" not in body
    assert "database_url" not in body


def test_an_engine_that_dies_leaves_the_pool(proxy, fake_engine: FakeEngine, until):
    until(lambda: [e["state"] for e in proxy.get("/api/engines")] == ["serving"])
    fake_engine.stop()
    until(lambda: proxy.get("/api/engines")[0]["state"] == "dead")


def test_a_body_is_json_whatever_its_content_type_says(proxy):
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d` sends
    opened = proxy.http.post(f"{proxy.url}/sessions", content='{"task": {"n": 1}}', headers=RUN | form)
    assert opened.status_code == 201, opened.text
    session = opened.json()["session_id"]
    rewarded = proxy.http.post(f"{proxy.url}/sessions/{session}/reward", content='{"value": 1}', headers=RUN | form)
    assert rewarded.status_code == 200


@pytest.mark.parametrize("body", ["task=1", "{", "", "[" * 100_000, b"\xff"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/json"])
def test_a_body_that_is_not_json_is_a_400(proxy, body, kind):
    refused = proxy.http.post(f"{proxy.url}/sessions", content=body, headers=RUN | {"Content-Type": kind})
    error = refused.json()["error"]
    if body == "":
        assert (refused.status_code, error["message"]) == (422, "the body: Field required")
    else:
        assert refused.status_code == 400, refused.text


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
