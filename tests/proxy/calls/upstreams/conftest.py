"""A proxy with upstreams: `judge` answers, `nobody` is down, `hasty` has a short time limit."""

import pytest

from agentrl.engine.server_process import free_port

from .judge_server import KEY, Judge


@pytest.fixture
def judge():
    found = Judge()
    yield found
    found.stop()


@pytest.fixture
def run_limits():
    return {}


@pytest.fixture
def run_config(run_config, run_limits, judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    base = {"base_url": f"http://127.0.0.1:{judge.port}/v1", "api_key_env": "JUDGE_KEY", "model": "gpt-x"}
    known = {"judge": base, "nobody": {"base_url": f"http://127.0.0.1:{free_port()}/v1"}}
    return run_config | {"proxy": {"upstreams": known | {"hasty": base | {"timeout_s": 0.3}}} | run_limits}
