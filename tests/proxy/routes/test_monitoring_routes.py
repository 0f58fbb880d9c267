"""Who may read which run, and what of its configuration."""

import socket
from typing import Any

import pytest
from run_records import create_run

ADMIN = {"Authorization": "Bearer admin-key"}
RUN = {"Authorization": "Bearer run-key"}
PASSWORD = "hunter2-hunter2"


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    args = {"db": {"password": PASSWORD, "user": "me"}, "apiKey": PASSWORD, "url": f"http://me:{PASSWORD}@host/x"}
    return run_config | {"agent_args": args}


@pytest.fixture
def other_run(proxy: Any) -> str:
    """A second run of the same database, with a session."""
    with proxy.database.write() as conn:
        return create_run(
            conn,
            name="other",
            config={"name": "other", "agent_args": {"secret": PASSWORD}},
            task_data=[],
            base_model="m",
            key="other-key",
            steps=0,
        )


def test_a_runs_key_reads_its_own_run_alone(proxy: Any, other_run: str) -> None:
    assert [run["name"] for run in proxy.get("/api/runs")] == ["test"]
    tokens = proxy.http.get(f"{proxy.url}/api/runs/{other_run}/trajectories/some/tokens", headers=RUN)
    assert (tokens.status_code, tokens.json()["error"]["code"]) == (404, "run_not_found")
    for path in ("", "/samples", "/steps", "/steps/1/lineage", "/events", "/evaluations", "/evaluations/episodes"):
        answer = proxy.http.get(f"{proxy.url}/api/runs/{other_run}{path}", headers=RUN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "run_not_found"), path
        assert proxy.http.get(f"{proxy.url}/api/runs/{proxy.run_id}{path}", headers=RUN).status_code == 200


def test_an_admins_key_reads_every_run(proxy: Any, other_run: str) -> None:
    assert {run["name"] for run in proxy.get("/api/runs", headers=ADMIN)} == {"test", "other"}
    assert proxy.get(f"/api/runs/{other_run}", headers=ADMIN)["name"] == "other"


def test_secrets_of_a_configuration_are_masked_for_everybody(proxy: Any, other_run: str) -> None:
    for headers in (RUN, ADMIN):
        answer = proxy.http.get(f"{proxy.url}/api/runs", headers=headers)
        assert PASSWORD not in answer.text
    args = proxy.get("/api/run")["config"]["agent_args"]
    assert args == {"db": {"password": "***", "user": "me"}, "apiKey": "***", "url": "http://me:***@host/x"}


def test_processes_are_listed_with_their_host_and_what_they_do(proxy: Any) -> None:
    about = {"host": "node-3", "pid": 7, "sessions": 12}
    assert proxy.post("/heartbeat", {"owner": "w/1", "about": about}).status_code == 200
    assert proxy.post("/heartbeat", {"owner": "old"}).status_code == 200
    found = {(each["kind"], each["name"]): each for each in proxy.get("/api/processes")}
    assert set(found) == {("proxy", "test-replica"), ("worker", "old"), ("worker", "w/1")}
    assert found["worker", "w/1"]["about"] == about
    assert found["worker", "old"]["about"] == {}
    mine = found["proxy", "test-replica"]
    assert mine["about"]["host"] == socket.gethostname()
    assert {"engines", "watches", "calls"} <= set(mine["about"])
    assert mine["leased_until"] == mine["last_seen_at"] + 60.0


@pytest.mark.parametrize("about", [{"host": "h" * 300}, {"pid": -1}, {"sessions": 2**40}, {"more": 1}, "text"])
def test_the_heartbeat_of_a_worker_is_bounded(proxy: Any, about: Any) -> None:
    assert proxy.post("/heartbeat", {"owner": "w", "about": about}).status_code in (400, 422)
    assert [each["kind"] for each in proxy.get("/api/processes")] == ["proxy"]
