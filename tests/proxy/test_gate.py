"""The gate: calls at once, calls and tokens of a session, as one process counts them and as the store knows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.access import limits
from agentrl.proxy.access.limits import Gate
from agentrl.store.sessions.session_usage import Usage


def gate(**given: Any) -> Gate:
    return Gate(**{"max_running": 8, "max_running_of_session": 4, **given})


def stored(*found: Usage) -> Any:
    """A state whose store answers with these figures, one reading after the other."""
    left = list(found)

    async def read(query: Any, root_id: str) -> Usage:
        return left.pop(0)

    return SimpleNamespace(read=read, left=left)


async def refused(gate: Gate, state: Any, answers: int = 1) -> RequestError:
    with pytest.raises(RequestError) as error:
        await gate.admit(state, "s", answers)
    return error.value


async def test_calls_at_once_are_limited_for_a_session_and_for_the_proxy() -> None:
    made = gate()
    places = [await made.admit(cast(Any, None), "s", 2) for _ in range(2)]
    error = await refused(made, None)
    assert (error.status, error.code, error.retry_after_s) == (429, "too_many_calls", limits.RETRY_AFTER_S)
    await made.admit(cast(Any, None), "other", 4)
    with pytest.raises(RequestError, match="the proxy has 8 calls under way"):
        await made.admit(cast(Any, None), "third", 1)
    places[0].close()
    places[0].close()
    assert made.running == 6
    await made.admit(cast(Any, None), "s", 2)
    assert (await refused(made, None)).status == 429


async def test_more_answers_than_the_limit_are_a_400_without_retry_after() -> None:
    error = await refused(gate(), None, 5)
    assert (error.status, error.param, error.retry_after_s) == (400, "n", None)


async def test_the_calls_of_a_session_are_limited_and_counted_by_the_store() -> None:
    made, state = gate(max_calls=5), stored(*(Usage(calls=calls, tokens=9) for calls in (3, 4, 4, 5)))
    (await made.admit(state, "s", 1)).close()
    cancelled = await made.admit(state, "s", 1)
    cancelled.cancel()
    (await made.admit(state, "s", 1)).close()
    error = await refused(made, state)
    assert (error.status, error.code, error.retry_after_s) == (403, "session_limit_reached", None)
    assert "5 of its 5 calls" in str(error)
    assert state.left == []


async def test_a_call_that_is_admitted_counts_before_the_store_knows_of_it() -> None:
    made, state = gate(max_calls=2), stored(*[Usage(calls=0, tokens=0)] * 3)
    for _ in range(2):
        await made.admit(state, "s", 1)
    assert (await refused(made, state)).code == "session_limit_reached"


async def test_the_tokens_of_a_session_are_limited_by_the_count_of_the_store() -> None:
    made, state = gate(max_tokens=10), stored(*(Usage(calls=1, tokens=tokens) for tokens in (0, 9, 10)))
    for _ in range(2):
        (await made.admit(state, "s", 1)).close()
    assert (await refused(made, state)).code == "session_limit_reached"


async def test_a_session_without_limits_is_never_looked_up() -> None:
    made = gate()
    for _ in range(2):
        (await made.admit(cast(Any, None), "s", 1)).close()
    assert made.running == 0


def test_the_messages_and_tools_of_a_request_are_limited() -> None:
    from agentrl.proxy.dialects.model_request import ModelRequest

    limits.check(ModelRequest(messages=[{}] * limits.MAX_MESSAGES, tools=[{}] * limits.MAX_TOOLS))
    for param, asked in (
        ("messages", ModelRequest(messages=[{}] * (limits.MAX_MESSAGES + 1))),
        ("tools", ModelRequest(tools=[{}] * (limits.MAX_TOOLS + 1))),
    ):
        with pytest.raises(RequestError) as error:
            limits.check(asked)
        assert (error.value.status, error.value.param) == (400, param)
