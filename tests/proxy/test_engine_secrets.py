"""What agents see of engines: neither where they are nor what else answers there; and keys nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from forks import ran

from agentrl.testing import FakeEngine, Reply

KEY = "arl-engine-0123456789abcdef0123456789abcdef"
HELLO = {"messages": [{"role": "user", "content": "ab"}]}


def ask(proxy: Any, session: dict[str, Any]) -> httpx.Response:
    bearer = {"Authorization": f"Bearer {session['api_key']}"}
    answer: httpx.Response = proxy.http.post(session["base_url"] + "/chat/completions", json=HELLO, headers=bearer)
    return answer


@pytest.mark.parametrize(
    ("replies", "status"),
    [
        ([Reply(status=400, error="no such thing")], 400),
        pytest.param([Reply(status=401, error="wrong key")], 502, marks=pytest.mark.long),
        ([Reply(status=500, error="Traceback: /srv/secret/model.py")], 502),
        pytest.param([Reply(error="its grammar is odd")], 400, marks=pytest.mark.long),
        ([Reply([5], omit=frozenset({"output_ids"}))], 502),
        pytest.param([Reply([5], drop_after=0)] * 2, 502, marks=pytest.mark.long),
    ],
)
def test_neither_an_error_nor_a_trace_names_an_engine(proxy, replies, status):
    session = proxy.session()
    proxy.engine.enqueue(*replies)
    answer = ask(proxy, session)
    assert answer.status_code == status
    own = {"Authorization": f"Bearer {session['api_key']}"}
    trace = proxy.get(f"/sessions/{session['session_id']}/trace", headers=own)
    for shown in (answer.text, str(trace)):
        assert str(proxy.engine.port) not in shown
        assert "/srv/secret" not in shown
    (call,) = trace["calls"]
    assert call["error"]


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_the_key_of_an_engine_is_sent_and_shown_nowhere(store_url, tmp_path, until, workers):
    with FakeEngine(key=KEY) as engine, (tmp_path / "log").open("wb") as log:
        env = os.environ | {
            "AGENTRL_DATABASE_URL": store_url,
            "AGENTRL_ADMIN_KEY": "admin-key",
            "AGENTRL_ENGINE_KEY": KEY,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        options = ["--engine", engine.url, "--port", "0", "--workers", workers, "--log-level", "debug"]
        command = [sys.executable, "-m", "agentrl", "proxy", "--run", "test", *options]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            until(lambda: "http://127.0.0.1:" in (tmp_path / "log").read_text() or process.poll() is not None)
            where = next(w for w in (tmp_path / "log").read_text().split() if w.startswith("http://127.0.0.1:"))
            admin = {"Authorization": "Bearer admin-key"}
            url = where.rstrip(",")

            def engines() -> Any:
                return httpx.get(f"{url}/api/engines", headers=admin).json()

            until(lambda: [found["state"] for found in engines()] == ["serving"])
            shown = str(engines()) + httpx.get(f"{url}/metrics", headers=admin).text
            told = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        finally:
            process.terminate()
            process.wait(120)
        assert KEY not in shown + told + (tmp_path / "log").read_text()


def test_a_password_in_an_engines_url_is_refused_unseen(store_url):
    command = ["proxy", "--run", "test", "--engine", "http://me:hunter2@127.0.0.1:1", "--database-url", store_url]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = ran(command, env)
    assert done.returncode == 2
    assert "AGENTRL_ENGINE_KEY" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
