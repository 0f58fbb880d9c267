"""Engines die, come back and change their weights under agents that notice nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from sqlalchemy import select, update

from agentrl.domain.schemas import Json, TrainedBatch, TrainedTrajectory
from agentrl.engine.server_process import free_port
from agentrl.proxy.calls.sampling import sampling
from agentrl.proxy.engines import pool as pools
from agentrl.proxy.engines.pool import EnginePool
from agentrl.store.audit import run_audit
from agentrl.store.tables import interaction_data, interactions, runs
from agentrl.store.training import steps, trainer_epochs
from agentrl.testing import FakeEngine, Reply

ADMIN = {"Authorization": "Bearer admin-key"}
HELLO = [{"role": "user", "content": "hi"}]
AGENTS, TURNS = 32, 4
NEWLINE, LETTER, LENGTH = 201, 67, 24  # ids of the tiny model
SENTENCE = "abcdefghijklmnopqrstuvwx"


def alphabet(input_ids: list[int], sampling_params: Json) -> list[int]:
    """The rest of SENTENCE: what a model does with prompt and answer so far. Any slip at a seam shows in the text."""
    done = next(n for n, token in enumerate(reversed(input_ids)) if token == NEWLINE)
    return [LETTER + n for n in range(done, LENGTH)] + [2]


@dataclass
class Fleet:
    """A proxy in front of two engines."""

    proxy: Any
    engines: list[FakeEngine]

    def serving(self) -> list[str]:
        return [engine["state"] for engine in self.proxy.get("/api/engines")]

    def spans(self) -> list[list[int]]:
        with self.proxy.database.read() as conn:
            found = conn.scalars(select(interaction_data.c.spans).where(interaction_data.c.spans.is_not(None)))
            return [span for spans in found for span in spans]

    def under_way(self) -> set[str]:
        with self.proxy.database.read() as conn:
            return set(conn.scalars(select(interactions.c.id).where(interactions.c.status == "running")))

    def violations(self) -> list[str]:
        with self.proxy.database.read() as conn:
            return list(run_audit.scan(conn, self.proxy.run_id))


@pytest.fixture
def pause() -> str:
    """`publish.pause` of the run; a test that names others has a fleet for each."""
    return "retract"


@pytest.fixture
def fleet(
    proxy: Any,
    store_url: str,
    serve: Callable[..., Any],
    until: Callable[..., Any],
    pause: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Fleet]:
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.1)
    with proxy.database.write() as conn:
        config = {**conn.scalars(select(runs.c.config)).one(), "publish": {"pause": pause}}
        conn.execute(update(runs).values(config=config))
    port = free_port()
    with (
        FakeEngine(alphabet, token_delay_s=0.002) as one,
        FakeEngine(alphabet, token_delay_s=0.002) as two,
        serve(store_url, [one.url, two.url], port, replica="fleet"),
    ):
        found = Fleet(replace(proxy, url=f"http://127.0.0.1:{port}", engine=one), [one, two])
        until(lambda: found.serving().count("serving") >= 2)
        yield found


async def agent(sdk: openai.AsyncOpenAI, session: Json, number: int, going: Callable[[], bool]) -> int:
    """Some turns of a conversation, and more as long as it is `going`. Every answer must be whole and right."""
    messages: list[Any] = []
    turn = 0
    mine = sdk.with_options(base_url=session["base_url"], api_key=session["api_key"])
    while turn < TURNS or going():
        if turn % TURNS == 0:
            messages.clear()
        messages.append({"role": "user", "content": f"{number}, {turn}"})
        if number % 2:
            stream = await mine.chat.completions.create(model="test", messages=messages, stream=True)
            answer = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        else:
            whole = await mine.chat.completions.create(model="test", messages=messages)
            answer = whole.choices[0].message.content or ""
        assert answer == SENTENCE
        messages.append({"role": "assistant", "content": answer})
        turn += 1
    return turn


def play(fleet: Fleet, trouble: Callable[[], None]) -> int:
    """All agents at once, while `trouble` goes on in this thread; how many calls were answered."""
    sessions = [fleet.proxy.session(sampling={"temperature": 1.0}) for _ in range(AGENTS)]
    troubled = threading.Event()

    async def everybody() -> list[int]:
        async with openai.AsyncOpenAI(api_key="each has its own", max_retries=0) as sdk:
            agents = (agent(sdk, session, n, lambda: not troubled.is_set()) for n, session in enumerate(sessions))
            return await asyncio.gather(*agents)

    with ThreadPoolExecutor(1) as beside:
        playing = beside.submit(lambda: asyncio.run(everybody()))
        try:
            trouble()
        finally:
            troubled.set()
        return sum(playing.result(120))


def new_version(proxy: Any, folder: Any) -> None:
    """Version 1, trained from two groups and not yet published."""
    for _ in range(2):
        for session in proxy.post("/groups").json()["sessions"]:
            proxy.sdk(session).chat.completions.create(model="test", messages=HELLO)
            proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
            proxy.post(f"/sessions/{session['session_id']}/end")
    with proxy.database.write() as conn:
        epoch = trainer_epochs.begin_epoch(conn, proxy.run_id)
        step_id = steps.lease(conn, proxy.run_id, epoch, step=1, n_groups=2, max_staleness=1, discount=1.0)
        batch = steps.batch(conn, step_id)
        trained = [
            TrainedTrajectory(
                trajectory_id=t.trajectory_id,
                advantage=0.5,
                staleness_max=0,
                staleness_mean=0.0,
                tokens_trained=LENGTH + 1,
            )
            for t in batch.trajectories
        ]
        facts = TrainedBatch(step_id=step_id, digest=batch.digest(), estimator="grpo", wasted_tokens=0, trained=trained)
        steps.complete(conn, proxy.run_id, epoch, facts, metrics={}, version=1, path=str(folder), checksum="c")


def publish(fleet: Fleet) -> None:
    answer = fleet.proxy.post("/admin/publish", {"version": 1}, headers=ADMIN)
    assert answer.status_code == 200, answer.text


@pytest.mark.long
def test_an_engine_that_dies_and_comes_back_again_and_again(fleet, tmp_path, until):
    new_version(fleet.proxy, tmp_path)
    publish(fleet)
    before = len(fleet.spans())

    def trouble() -> None:
        for times in range(6):
            engine = fleet.engines[times % 2]
            until(lambda e=engine: len(e.running) >= 4)
            engine.stop()
            hit = fleet.under_way()  # after the stop: a call that began just before it was hit too
            if times < 4:  # else it is back on base weights before anybody has looked
                until(lambda: "dead" in fleet.serving())
            engine.start()
            until(lambda e=engine: e.version == "1" and "dead" not in fleet.serving())
            until(lambda h=hit: not h & fleet.under_way())  # one that is hit twice is given up

    calls = play(fleet, trouble)
    assert calls >= AGENTS * TURNS
    assert [engine.version for engine in fleet.engines] == ["1", "1"]
    assert {span[0] for span in fleet.spans()[before:]} == {1}
    assert fleet.violations() == []


@pytest.mark.parametrize(
    "pause", [*(pytest.param(mode, marks=pytest.mark.long) for mode in ("retract", "in_place")), "abort"]
)
def test_a_publish_under_load_loses_no_call(fleet, tmp_path, until, pause):
    new_version(fleet.proxy, tmp_path)
    for engine in fleet.engines:
        engine.token_delay_s = 0.02  # so that calls are under way when an engine pauses

    def trouble() -> None:
        until(lambda: all(len(engine.running) >= 4 for engine in fleet.engines))
        publish(fleet)

    play(fleet, trouble)
    assert {span[0] for span in fleet.spans()} == {0, 1}
    modes = {body["mode"] for engine in fleet.engines for path, body in engine.calls if path == "/pause_generation"}
    assert modes == {pause}
    assert fleet.violations() == []
    with fleet.proxy.database.read() as conn:
        calls = select(interaction_data.c.spans, interactions.c.kv_mixed).join(interactions)
        found = conn.execute(calls.where(interaction_data.c.spans.is_not(None))).all()
    several = [call.kv_mixed for call in found if len(call.spans) > 1]
    asked = [request.get("extra_key") for engine in fleet.engines for request in engine.requests]
    if pause == "in_place":
        assert several
        assert all(several)
        assert not all(call.kv_mixed for call in found)
        assert {"v0", "v1"} <= set(asked)
        assert None not in asked
    else:
        assert not any(call.kv_mixed for call in found)
        assert set(asked) == {None}


OPTIONS = [{"seed": 3}, {"response_format": {"type": "json_object"}}]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_answer_that_cannot_be_continued_starts_again_if_nothing_was_sent(proxy, options):
    session, ids = proxy.session(), proxy.says("abcd")
    proxy.engine.enqueue(Reply(ids, drop_after=2), ids)
    answer = proxy.sdk(session).chat.completions.create(model="test", messages=HELLO, **options)
    assert answer.choices[0].message.content == "abcd"
    first, second = proxy.engine.requests
    assert second["input_ids"] == first["input_ids"]
    assert len({request["rid"] for request in proxy.engine.requests}) == 2


@pytest.mark.parametrize("options", OPTIONS)
def test_an_answer_that_cannot_be_continued_fails_if_some_of_it_was_sent(proxy, options):
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), drop_after=2))
    stream = proxy.sdk(session).chat.completions.create(model="test", messages=HELLO, stream=True, **options)
    with pytest.raises(openai.APIError, match="cannot be continued"):
        list(stream)
    (call,) = proxy.calls(session)
    assert call["status"] == "failed"
    assert "cannot be continued" in call["error"]
    assert len(proxy.engine.requests) == 1


def test_a_call_that_kills_every_engine_is_given_up(proxy, monkeypatch):
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.05)
    session = proxy.session()
    proxy.engine.enqueue(*[Reply(proxy.says("abcd"), drop_after=0)] * 20)
    with pytest.raises(openai.InternalServerError, match="engines died") as caught:
        proxy.sdk(session).with_options(max_retries=2).chat.completions.create(model="test", messages=HELLO)
    assert caught.value.status_code == 502
    assert len(proxy.engine.requests) == sampling.MAX_DEATHS + 1 == 2  # not on a third, nor does the SDK ask again


def test_without_a_retry_budget_a_call_is_not_retried(proxy, monkeypatch):
    monkeypatch.setattr("agentrl.proxy.engines.retry_budget.FLOOR", -1)
    monkeypatch.setattr("agentrl.proxy.engines.retry_budget.SHARE", 0.0)
    session = proxy.session()
    proxy.engine.enqueue(Reply(proxy.says("abcd"), drop_after=1))
    refused = proxy.http.post(
        session["base_url"] + "/chat/completions",
        json={"messages": HELLO},
        headers={"Authorization": f"Bearer {session['api_key']}"},
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert refused.headers["retry-after"] == "5"
    assert len(proxy.engine.requests) == 1


def test_a_drained_engine_finishes_and_gets_no_more_from_any_replica(proxy, second, monkeypatch, until):
    reads: list[EnginePool] = []
    read = EnginePool.read_fleet

    async def counted(pool: EnginePool) -> None:
        await read(pool)
        if [engine.url for engine in pool.engines] == [proxy.engine.url]:  # not one of a proxy that is being stopped
            reads.append(pool)

    monkeypatch.setattr(EnginePool, "read_fleet", counted)
    until(lambda: [e["state"] for e in proxy.get("/api/engines")] == ["serving"])
    url = proxy.engine.url
    proxy.engine.enqueue(Reply(proxy.says("ab"), hold_after=1))
    held = proxy.session()
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(proxy.sdk(held).chat.completions.create(model="test", messages=HELLO))
    )
    asking.start()
    until(lambda: proxy.engine.holding)
    assert proxy.post("/api/engines/drain", {"url": url}).status_code == 403
    assert proxy.post("/api/engines/drain", {"url": "http://x"}, headers=ADMIN).status_code == 404
    drained = proxy.post("/api/engines/drain", {"url": url}, headers=ADMIN).json()
    assert drained == {"url": url, "draining": True, "running": 1}
    assert [engine["draining"] for engine in proxy.get("/api/engines")] == [True]
    proxy.engine.release()
    asking.join(120)
    assert answers[0].choices[0].message.content == "ab"
    reads.clear()
    # Each pool's second read began after the engine was drained; the first may have begun before.
    until(lambda: len(set(reads)) == 2 and all(reads.count(pool) > 1 for pool in set(reads)))
    session = second.session()
    waiting = threading.Thread(
        target=lambda: answers.append(second.sdk(session).chat.completions.create(model="test", messages=HELLO))
    )
    waiting.start()
    until(lambda: [call["status"] for call in second.get(f"/api/sessions/{session['session_id']}")["calls"]])
    asked = len(proxy.engine.requests)
    resumed = proxy.post("/api/engines/resume", {"url": url}, headers=ADMIN).json()
    assert (asked, resumed["draining"], resumed["running"]) == (1, False, 0)
    waiting.join(120)
    assert len(answers) == 2
