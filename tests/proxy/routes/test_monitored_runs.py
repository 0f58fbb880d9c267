"""What the monitoring routes tell of a run, and the key that they need."""

import pytest
from databases import KINDS

from .played_sessions import ADMIN, trained_version

pytestmark = pytest.mark.parametrize("database_kind", KINDS)
RUN = {"Authorization": "Bearer run-key"}


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
