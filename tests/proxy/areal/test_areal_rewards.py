"""Rewards through AReaL's routes: the call that each belongs to, and calls that get none."""

import openai
import pytest
from databases import KINDS

from agentrl.store.audit import run_audit

from .areal_calls import HELLO, ask, bearer, end, export, lists, model, reward, start, two_turns

pytestmark = pytest.mark.parametrize("database_kind", KINDS)


def test_rewards_are_of_calls_of_the_session_and_survive_being_repeated(proxy):
    session, other = start(proxy), start(proxy)
    early = reward(proxy, session, 1.0)
    assert (early.status_code, early.json()["error"]["code"]) == (400, "no_interactions")
    first, last = two_turns(proxy, session)
    stranger = ask(proxy, other)
    for wrong in (stranger.id, "chatcmpl-none"):
        assert reward(proxy, session, 1.0, wrong).status_code == 400
    for value in (0.1, 0.25, 0.25):  # a later one counts, a repeated one changes nothing
        reward(proxy, session, value, first.id)
    for _ in range(2):
        reward(proxy, session, 0.5, last.id, **{"Idempotency-Key": "k"})
    end(proxy, session)
    assert [item["reward"] for item in export(proxy, session).values()] == [0.75, 0.5]
    assert [item["reward"] for item in export(proxy, session, discount=0.5).values()] == [0.5, 0.5]
    assert proxy.post("/rl/set_reward", {"reward": "much"}, headers=bearer(session["api_key"])).status_code == 422


def test_a_reward_without_an_id_is_the_last_call_s_and_no_later_one_s(proxy):
    """An agent that rewards turn by turn: a call that follows is not paid for what came before it."""
    session = start(proxy)
    first = ask(proxy, session)
    reward(proxy, session, 1.0)
    talk = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
    ask(proxy, session, talk)
    end(proxy, session)
    assert [item["reward"] for item in export(proxy, session).values()] == [1.0, 0.0]
    (given,) = proxy.get(f"/sessions/{session['session_id']}/rewards")
    assert (given["interaction_id"], given["scope"]) == (first.id.removeprefix("chatcmpl-"), "call")


def test_a_side_call_that_comes_last_does_not_take_the_reward(proxy):
    session = start(proxy)
    first = ask(proxy, session)
    ask(proxy, session, [{"role": "user", "content": "a title"}], extra_headers={"X-Turn-Type": "side"})
    reward(proxy, session, 1.0)
    (given,) = proxy.get(f"/sessions/{session['session_id']}/rewards")
    assert given["interaction_id"] == first.id.removeprefix("chatcmpl-")


@pytest.mark.long_on("postgresql")
def test_a_call_that_is_not_to_be_stored_is_kept_out(proxy):
    """Of training, of exports, of the count, and of the reward; it is recorded all the same."""
    session = start(proxy)
    first = ask(proxy, session)
    ask(proxy, session, [{"role": "user", "content": "judge this"}], store=False)
    model(proxy, session).responses.create(model="default", input="and this", store=False)
    ask(proxy, session, [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}], store=True)
    reward(proxy, session, 1.0)
    assert end(proxy, session).json()["interaction_count"] == 2
    assert len(export(proxy, session)) == 2
    assert len(export(proxy, session, style="concat")) == 1
    calls = proxy.calls(session)
    assert [call["trainable"] for call in calls] == [True, False, False, True]
    assert [call["role"] for call in calls] == ["main", "side", "side", "main"]
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


def test_outside_of_areals_routes_store_false_has_no_effect(proxy):
    """Many SDKs send it with every call."""
    session = start(proxy)
    sdk = openai.OpenAI(base_url=proxy.url + "/v1", api_key=session["api_key"], max_retries=0)
    sdk.chat.completions.create(model="default", messages=HELLO, store=False)
    assert [call["trainable"] for call in proxy.calls(session)] == [True]


@pytest.mark.long_on("postgresql")
def test_rewards_turn_by_turn_add_up_and_a_failed_call_gets_none(proxy):
    from agentrl.testing import Reply

    session = start(proxy)
    first = ask(proxy, session)
    reward(proxy, session, 0.25)
    proxy.engine.enqueue(Reply(error="no"))
    with pytest.raises(openai.APIStatusError):
        model(proxy, session).chat.completions.create(model="default", messages=HELLO)
    reward(proxy, session, 0.5)  # after the same delivered call: a correction
    talk = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
    ask(proxy, session, talk)
    reward(proxy, session, 1.0)
    assert end(proxy, session).json()["interaction_count"] == 2
    assert [item["reward"] for item in lists(proxy, session, style="concat").values()] == [1.5]


def test_an_end_can_be_repeated_and_a_late_reward_is_not_applied(proxy):
    session = start(proxy)
    ask(proxy, session)
    assert end(proxy, session).json() == end(proxy, session).json()
    late = reward(proxy, session, 1.0).json()
    assert (late["message"], late["applied"]) == ("success", False)
