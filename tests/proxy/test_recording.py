"""A run that only records: programs are sampled as they ask."""

import pytest


@pytest.fixture
def run_config(run_config):
    return run_config | {"steps": 0}


@pytest.mark.parametrize(("asked", "got"), [({"temperature": 0.2}, 0.2), ({"temperature": 0}, 0.0), ({}, 1.0)])
def test_a_recording_run_uses_the_programs_temperature(proxy, asked, got):
    session = proxy.post("/sessions").json()
    message = {"role": "user", "content": "ab"}
    proxy.sdk(session).chat.completions.create(model="test", messages=[message], **asked)
    assert proxy.engine.requests[0]["sampling_params"]["temperature"] == got
    (call,) = proxy.calls(session)
    assert "replaced" not in (call["options"] or {})
