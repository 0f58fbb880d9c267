"""Replicas and engines that die in the trainer's turn on the GPUs, and publishes that fail in it."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from serving import add_version

from agentrl.engine.server_process import free_port
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.store.training import memory_leases

from .turn_calls import ADMIN, EVERYTHING, SENTENCE, ask, half_answered, publish, release, reload, serves, spans, states


def test_a_killed_replica_leaves_the_turn_to_the_others(proxy, epoch, serve, store_url, beside, until, weights):
    """The trainer asked it; another one publishes. A call of the other waits meanwhile."""
    port = free_port()
    with serve(store_url, [proxy.engine.url], port, replica="killed"):
        killed = f"http://127.0.0.1:{port}/api/engines/release"
        assert proxy.http.post(killed, json={"epoch": epoch}, headers=ADMIN).status_code == 200
    session = proxy.session()
    until(lambda: states(proxy) == ["released"])
    waiting = beside.submit(ask, proxy, session)
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["running"])
    assert proxy.engine.released == EVERYTHING
    add_version(proxy.database, proxy.run_id, 1, weights)
    assert publish(proxy, 1, epoch).status_code == 200
    assert waiting.result(60) == SENTENCE
    assert spans(proxy, session)[0][0] == 1


def test_a_restarted_replica_leaves_the_engines_released(proxy, epoch, serve, store_url, until):
    port = free_port()
    assert release(proxy, epoch).status_code == 200
    calls = len(proxy.engine.calls)
    with serve(store_url, [proxy.engine.url], port, replica="new"):
        url = f"http://127.0.0.1:{port}/api/engines/release"
        assert proxy.http.post(url, json={"epoch": epoch}, headers=ADMIN).json()["engines"] == {
            proxy.engine.url: "released"
        }
    assert len(proxy.engine.calls) == calls
    assert proxy.engine.released == EVERYTHING


@pytest.mark.parametrize("streamed_before", [False, True])
def test_an_engine_that_is_killed_in_the_turn_comes_back_without_memory(
    proxy, epoch, beside, until, weights, streamed_before
):
    """Its call goes on where it was, once there is a version to go on with."""
    if streamed_before:
        session, answer = half_answered(proxy, beside, until)
    assert release(proxy, epoch).status_code == 200
    proxy.engine.stop()
    until(lambda: states(proxy) == ["dead"])
    if not streamed_before:
        session = proxy.session()
        answer = beside.submit(ask, proxy, session)
        until(lambda: [call["status"] for call in proxy.calls(session)] == ["running"])
    n_requests = len(proxy.engine.requests)
    proxy.engine.start()  # with base weights and all of its memory
    until(lambda: states(proxy) == ["released"])
    assert proxy.engine.released == EVERYTHING
    assert len(proxy.engine.requests) == n_requests
    add_version(proxy.database, proxy.run_id, 1, weights)
    assert publish(proxy, 1, epoch).status_code == 200
    assert answer.result(60) == SENTENCE
    assert spans(proxy, session)[-1][0] == 1
    assert len(spans(proxy, session)) == 1 + streamed_before


@pytest.mark.parametrize("turn_goes_on", [False, True])
def test_an_engine_whose_replica_died_while_it_reloaded_is_finished_by_another(proxy, epoch, until, turn_goes_on):
    """It has memory for its weights again, and nothing in it. Asking for that memory again would kill it."""
    assert release(proxy, epoch).status_code == 200
    asyncio.run(resumed(proxy.engine.url))
    if turn_goes_on:
        until(lambda: proxy.engine.released == EVERYTHING)
    assert reload(proxy, epoch).json()["engines"] == {proxy.engine.url: "serving"}
    assert not proxy.engine.released
    assert not proxy.engine.undefined
    assert proxy.engine.version == "0"


async def resumed(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        await SGLangClient(url, http).resume_weights()


def test_a_dead_engine_does_not_keep_the_trainer_waiting(proxy, epoch, until):
    proxy.engine.stop()
    assert release(proxy, epoch).json()["engines"] == {proxy.engine.url: "dead"}


@pytest.mark.parametrize("trainer_dies", [False, True])
def test_a_publish_that_fails_is_repeated_or_finished_by_the_probes(
    proxy, epoch, weights, until, monkeypatch, trainer_dies
):
    """The engine refuses the folder once. It then loads the version that the trainer handed over, not the older one."""
    if trainer_dies:
        monkeypatch.setattr(memory_leases, "HANDING_S", 1.0)
    assert release(proxy, epoch).status_code == 200
    add_version(proxy.database, proxy.run_id, 1, weights)
    proxy.engine.fail_next_update = "no space"
    assert publish(proxy, 1, epoch).status_code == 503
    if trainer_dies:
        until(lambda: proxy.engine.version == "1" and not proxy.engine.released)
    assert publish(proxy, 1, epoch).status_code == 200
    assert serves(proxy, 1)
    loads = [body["model_path"] for path, body in proxy.engine.calls if path == "/update_weights_from_disk"]
    assert loads == [str(weights)] * 2
