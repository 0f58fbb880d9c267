"""No call stays `running` while its replica lives, whatever became of it: a running call keeps its session alive."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import openai
import pytest

from agentrl.errors import StoreError
from agentrl.proxy.calls import call_attempt, model_call, sweep
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.sweep import Sweep
from agentrl.proxy.run_store import RunStore
from agentrl.store.calls import call_intents, call_outcomes, running_calls
from agentrl.store.db.faults import OutcomeUnknown
from agentrl.testing import Reply


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "EVERY_S", 0.05)
    monkeypatch.setattr(sweep, "FORGOTTEN_S", 0.0)


def refuse(*_: Any, **__: Any) -> Any:
    raise StoreError("disk is full")


def ask(proxy: Any, session: dict[str, Any], **options: Any) -> Any:
    messages = [{"role": "user", "content": "ab"}]
    return proxy.sdk(session).chat.completions.create(model="test", messages=messages, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_can_be_neither_committed_nor_failed_becomes_lost(proxy, monkeypatch, until, stream):
    session = proxy.session()
    fail = running_calls.fail
    with monkeypatch.context() as outage:
        outage.setattr(call_outcomes, "finish", refuse)
        outage.setattr(running_calls, "fail", refuse)
        with pytest.raises(openai.APIError, match="not delivered: disk is full"):
            list(ask(proxy, session, stream=stream))
        outage.setattr(running_calls, "fail", fail)
        until(lambda: [call["status"] for call in proxy.calls(session)] == ["lost"])


def test_a_call_with_an_unknown_start_is_not_sampled(proxy, monkeypatch, until):
    session = proxy.session()
    write = RunStore.write

    async def lost_at_commit(store: RunStore, unit: Any, *args: Any, **kwargs: Any) -> Any:
        result = await write(store, unit, *args, **kwargs)
        if unit is call_intents.begin:
            raise OutcomeUnknown("the connection was lost during COMMIT")
        return result

    monkeypatch.setattr(RunStore, "write", lost_at_commit)
    with pytest.raises(openai.APIStatusError) as told:
        ask(proxy, session)
    assert told.value.status_code == 503
    until(lambda: [call["status"] for call in proxy.calls(session)] == ["lost"])
    assert proxy.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_internal_error_fails_the_call_and_is_logged(proxy, monkeypatch, caplog, stream):
    """It is told and recorded, and logged with its traceback."""

    def broken(*_: Any) -> Any:
        raise KeyError("boom")

    monkeypatch.setattr(call_attempt, "message_of", broken)
    session = proxy.session()
    with caplog.at_level(logging.ERROR), pytest.raises(openai.APIError, match="not delivered: 'boom'"):
        list(ask(proxy, session, stream=stream))
    assert [(call["status"], call["error"]) for call in proxy.calls(session)] == [("failed", "'boom'")]
    assert "Traceback" in caplog.text


class TestWithoutGrace:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"retry_grace_s": 0}}

    def test_a_call_with_an_unrecorded_abort_becomes_lost(self, proxy, monkeypatch, until):
        session = proxy.session()
        proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
        with ask(proxy, session, stream=True) as stream, monkeypatch.context() as outage:
            next(iter(stream))
            until(lambda: proxy.engine.holding)
            refused = []

            def fail(*args: Any) -> None:
                refused.append(args)
                refuse()

            outage.setattr(running_calls, "fail", fail)
            stream.close()
            until(lambda: refused and not proxy.engine.running)
        until(lambda: [call["status"] for call in proxy.calls(session)] == ["lost"])


def test_a_call_that_runs_is_left_alone(proxy, monkeypatch, until):
    session = proxy.session()
    sweeps = []
    close = Sweep.close_forgotten

    async def counted(one: Sweep) -> None:
        await close(one)
        sweeps.append(one)

    monkeypatch.setattr(Sweep, "close_forgotten", counted)
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=1))
    with ask(proxy, session, stream=True) as stream:
        until(lambda: proxy.engine.holding)
        swept = len(sweeps)
        until(lambda: len(sweeps) > swept + 2)
        proxy.engine.release()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"
    assert [call["status"] for call in proxy.calls(session)] == ["complete"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_whole_in_time_fails_and_leaves_the_engine_serving(proxy, monkeypatch, until, stream):
    session = proxy.session()
    ask(proxy, session)
    run = model_call.run

    async def hurried(context: CallContext, *args: Any) -> Any:
        settings = replace(context.settings, request_timeout_s=0.2)
        return await run(replace(context, settings=settings), *args)

    monkeypatch.setattr(model_call, "run", hurried)
    proxy.engine.enqueue(Reply(proxy.says("hello"), hold_after=0))
    with pytest.raises(openai.InternalServerError) as caught:
        ask(proxy, session, stream=stream)
    assert caught.value.status_code == 504
    assert [call["status"] for call in proxy.calls(session)] == ["complete", "failed"]
    until(lambda: not proxy.engine.running)
    monkeypatch.setattr(model_call, "run", run)
    assert [engine["state"] for engine in proxy.get("/api/engines")] == ["serving"]
