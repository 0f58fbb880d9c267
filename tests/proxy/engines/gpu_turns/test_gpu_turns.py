"""The trainer's turns on the engines' GPUs: memory is released and taken back, no call is lost, and versions are exact.

The fake engine dies, as SGLang does, of a release while requests run, and of weights that it uses without memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from databases import KINDS
from safetensors.numpy import load_file, save_file
from serving import add_version
from sqlalchemy import select, update

from agentrl.domain.schemas import Json
from agentrl.engine.server_process import free_port
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineRejected
from agentrl.store import events
from agentrl.store.tables import runs
from agentrl.store.training import memory_leases, trainer_epochs
from agentrl.testing import FakeEngine

from .turn_calls import (
    ADMIN,
    EVERYTHING,
    HELLO,
    LENGTH,
    SENTENCE,
    ask,
    half_answered,
    publish,
    release,
    reload,
    serves,
    spans,
    states,
)

CYCLE = [
    "/pause_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/update_weight_version",
    "/end_weight_update",
    "/resume_memory_occupation",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/resume_memory_occupation",
    "/update_weight_version",
    "/continue_generation",
]


def told(proxy: Any, kind: str) -> list[Json]:
    return [event.data for event in proxy.database.query(events.of_run, proxy.run_id, kind)]


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_a_whole_cycle_holds_calls_and_continues_them_with_the_new_version(
    proxy, epoch, beside, until, weights, database_kind
):
    session, answer = half_answered(proxy, beside, until)
    released = release(proxy, epoch).json()
    assert released["engines"] == {proxy.engine.url: "released"}
    assert proxy.engine.released == EVERYTHING
    assert states(proxy) == ["released"]
    proxy.engine.release()  # the reply need not wait any more, but its engine is paused
    n_requests, other = len(proxy.engine.requests), proxy.session()
    waiting = beside.submit(ask, proxy, other)
    until(lambda: [call["status"] for call in proxy.calls(other)] == ["running"])
    assert release(proxy, epoch).json()["engines"] == {proxy.engine.url: "released"}  # again, for more time
    assert len(proxy.engine.requests) == n_requests  # the call waits at the proxy
    assert not answer.done()
    add_version(proxy.database, proxy.run_id, 1, weights)
    facts = publish(proxy, 1, epoch).json()
    assert facts["transport"] == {proxy.engine.url: "disk"}
    assert (answer.result(60), waiting.result(60)) == (SENTENCE, SENTENCE)
    assert spans(proxy, session) == [[0, 0, 7], [1, 7, LENGTH]]
    assert spans(proxy, other) == [[1, 0, LENGTH + 1]]
    assert not proxy.engine.released
    assert serves(proxy, 1)
    paths = [path for path, _ in proxy.engine.calls]
    assert paths == CYCLE
    assert told(proxy, "memory_granted") == [{"epoch": epoch}]


@pytest.mark.parametrize("run_config", [{"pause": "abort"}, {"pause": "in_place"}], indirect=True, ids=str)
def test_calls_are_paused_as_a_publish_pauses_them(proxy, epoch, beside, until, weights):
    session, answer = half_answered(proxy, beside, until)
    assert release(proxy, epoch).status_code == 200
    proxy.engine.release()
    add_version(proxy.database, proxy.run_id, 1, weights)
    assert publish(proxy, 1, epoch).status_code == 200
    assert answer.result(60) == SENTENCE
    assert [span[0] for span in spans(proxy, session)] == [0, 1]


def test_engines_return_to_the_runs_version_without_a_publish(proxy, epoch, beside, until):
    session, answer = half_answered(proxy, beside, until)
    assert release(proxy, epoch).status_code == 200
    proxy.engine.release()
    assert reload(proxy, epoch).json()["engines"] == {proxy.engine.url: "serving"}
    assert answer.result(60) == SENTENCE
    assert spans(proxy, session) == [[0, 0, LENGTH]]
    assert serves(proxy, 0)
    assert told(proxy, "memory_returned") == [{"epoch": epoch, "why": "asked to"}]
    assert reload(proxy, epoch).status_code == 200  # harmless


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_engines_return_when_the_trainer_is_killed(proxy, second, epoch, beside, until, database_kind):
    """Its lease is not renewed. Either replica ends the turn; one of them loads the run's version."""
    session, answer = half_answered(proxy, beside, until)
    assert release(proxy, epoch, lease_s=1.0).status_code == 200
    proxy.engine.release()
    until(lambda: serves(proxy, 0))
    assert answer.result(60) == SENTENCE
    assert spans(proxy, session) == [[0, 0, LENGTH]]
    assert told(proxy, "memory_returned") == [{"epoch": epoch, "why": "its lease ended"}]
    assert ask(second, second.session()) == SENTENCE
    assert [path for path, _ in proxy.engine.calls].count("/update_weights_from_disk") == 1


def test_no_turn_begins_while_an_engine_starts(proxy, epoch):
    start = proxy.database.transact
    assert start(memory_leases.may_start, proxy.run_id, "http://127.0.0.1:1", 60.0)
    refused = release(proxy, epoch)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engines_starting")
    assert "serving" in states(proxy)
    start(memory_leases.has_ended, proxy.run_id, "http://127.0.0.1:1")
    assert release(proxy, epoch).status_code == 200


def test_a_release_waits_until_the_engine_is_idle(proxy, epoch, monkeypatch, beside, until):
    """A grammar that is being compiled keeps SGLang from being idle; a release would kill it."""
    session, answer = half_answered(proxy, beside, until)
    flush, busy = SGLangClient.flush_cache, [True]

    async def refused(self: SGLangClient) -> None:
        if busy:
            raise EngineRejected("a grammar is being compiled")
        await flush(self)

    monkeypatch.setattr(SGLangClient, "flush_cache", refused)
    first = release(proxy, epoch, lease_s=1.0)
    assert (first.status_code, first.json()["error"]["code"]) == (503, "memory_not_released")
    assert not proxy.engine.released
    busy.clear()
    until(lambda: release(proxy, epoch).status_code == 200)
    proxy.engine.release()
    assert reload(proxy, epoch).status_code == 200
    assert answer.result(60) == SENTENCE
    assert spans(proxy, session) == [[0, 0, LENGTH]]


def test_only_the_trainer_whose_turn_it_is_publishes(proxy, epoch, weights):
    assert release(proxy, epoch).status_code == 200
    add_version(proxy.database, proxy.run_id, 1, weights)
    newer = proxy.database.transact(trainer_epochs.begin_epoch, proxy.run_id)
    for other, status, code in [(None, 503, "memory_leased"), (newer, 503, "memory_leased"), (epoch, 409, None)]:
        answer = publish(proxy, 1, other)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code or "epoch_over"), answer.text
    assert release(proxy, epoch).status_code == 409
    assert proxy.engine.released == EVERYTHING
    assert release(proxy, newer).status_code == 200
    assert publish(proxy, 1, newer).status_code == 200
    assert serves(proxy, 1)


def test_a_version_of_some_layers_is_loaded_over_the_base_weights(proxy, epoch, tmp_path, tiny_model):
    """The weights of the other layers are gone, too."""
    tensors = load_file(tiny_model / "model.safetensors")
    some, whole = tmp_path / "some", tmp_path / "whole"
    for folder, kept in [(some, dict(list(tensors.items())[:2])), (whole, tensors)]:
        folder.mkdir()
        save_file(kept, folder / "model.safetensors")
    for version, folder, loads in [(1, some, [tiny_model, some]), (2, whole, [whole])]:
        assert release(proxy, epoch).status_code == 200
        add_version(proxy.database, proxy.run_id, version, folder)
        proxy.engine.calls.clear()
        assert publish(proxy, version, epoch).status_code == 200
        found = [body["model_path"] for path, body in proxy.engine.calls if path == "/update_weights_from_disk"]
        assert found == [str(path) for path in loads]
        assert serves(proxy, version)


def test_a_call_that_waits_too_long_gets_the_error_of_engines_that_are_away(proxy, epoch, serve, store_url):
    with proxy.database.write() as conn:
        config = conn.scalars(select(runs.c.config)).one()
        conn.execute(update(runs).values(config=config | {"proxy": {"request_timeout_s": 1.0}}))
    port = free_port()
    with serve(store_url, [proxy.engine.url], port, replica="impatient"):
        url = f"http://127.0.0.1:{port}"
        assert proxy.http.post(f"{url}/api/engines/release", json={"epoch": epoch}, headers=ADMIN).status_code == 200
        session = proxy.session()
        answer = proxy.http.post(
            f"{url}/sessions/{session['session_id']}/v1/chat/completions",
            json={"messages": HELLO},
            headers={"Authorization": f"Bearer {session['api_key']}"},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("release", {"epoch": -1}, 422),
        ("release", {"epoch": 1, "lease_s": 0.5}, 422),
        ("release", {"epoch": 1, "lease_s": 1e9}, 422),
        ("reload", {}, 422),
        ("reload", {"epoch": 1, "x": 1}, 422),
    ],
)
def test_invalid_bodies_are_refused(proxy, path, body, status):
    answer = proxy.post(f"/api/engines/{path}", body, headers=ADMIN)
    assert answer.status_code in (status, 400), answer.text
    assert proxy.post(f"/api/engines/{path}", {"epoch": 1}).status_code == 403


def test_two_engines_release_and_load_together(proxy, epoch, serve, store_url, until, weights):
    port = free_port()
    with FakeEngine() as other, serve(store_url, [proxy.engine.url, other.url], port, replica="two"):
        until(lambda: states(proxy) == ["serving"] * 2)
        url = f"http://127.0.0.1:{port}"
        assert proxy.http.post(f"{url}/api/engines/release", json={"epoch": epoch}, headers=ADMIN).status_code == 200
        assert proxy.engine.released == other.released == EVERYTHING
        add_version(proxy.database, proxy.run_id, 1, weights)
        body = {"version": 1, "epoch": epoch}
        assert proxy.http.post(f"{url}/admin/publish", json=body, headers=ADMIN).status_code == 200
        assert not proxy.engine.released | other.released
        assert proxy.engine.version == other.version == "1"
