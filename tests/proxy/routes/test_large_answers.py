"""Answers that grow with a session are written in threads, and bodies of routes that sample nothing are small."""

from __future__ import annotations

import asyncio

import fastapi.routing
import pytest

from agentrl.proxy.routes import large_answers
from agentrl.proxy.routes.authenticated_bodies import BODY_BYTES

ADMIN = {"Authorization": "Bearer admin-key"}


@pytest.mark.parametrize(
    "path",
    [
        "/sessions/{session}/trace",
        "/api/sessions/{session}",
        "/api/runs/{run}/steps",
        "/api/runs/{run}/steps/1/lineage",
        "/api/runs/{run}/events",
        "/api/runs/{run}/evaluations/episodes",
    ],
)
def test_answers_that_grow_are_written_off_the_loop(proxy, monkeypatch, path, until):
    session = proxy.session()
    proxy.sdk(session).chat.completions.create(model="default", messages=[{"role": "user", "content": "a"}])
    recorded = f"/api/sessions/{session['session_id']}"
    until(lambda: [call["delivery"] for call in proxy.get(recorded)["calls"]] == ["given"])
    url = path.format(session=session["session_id"], run=proxy.run_id)
    before = proxy.get(url, headers=ADMIN)
    loops: list[object] = []
    written = large_answers.as_json

    def noted(value):
        loops.append(asyncio._get_running_loop())
        return written(value)

    def never(**_):
        raise AssertionError("FastAPI writes it on the loop")

    monkeypatch.setattr(large_answers, "as_json", noted)
    monkeypatch.setattr(fastapi.routing, "serialize_response", never)
    assert proxy.get(url, headers=ADMIN) == before
    assert loops == [None]


def test_integers_of_any_size_are_written():
    assert large_answers.as_json({"a": [1, 2**70]}) == b'{"a":[1,1180591620717411303424]}'


def test_the_body_of_a_route_that_samples_nothing_is_bounded(proxy):
    session = proxy.session()
    body = {"value": 1.0, "name": "x" * BODY_BYTES}
    answer = proxy.post(f"/sessions/{session['session_id']}/reward", body)
    assert answer.status_code == 413
    assert str(BODY_BYTES) in answer.text
