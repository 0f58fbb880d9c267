"""Forks by edited, truncated and dropped messages, made over real HTTP, and what the doctor says of them."""

from __future__ import annotations

import json

import pytest

from agentrl.diagnosis.report import neighbourhood
from agentrl.testing import Reply

from .reported_forks import ADD, U1, U2, U3, S, says, the_fork

CALL = 'add({"a":1})'


def test_an_edited_message_with_its_first_token_and_cost(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [S, U1], "first answer")
    ask(session, [S, says("user", "One"), a1, U2])
    report = examine(session)
    fork = the_fork(report, "history_edited")
    assert "the client edited message 2 (user)" in report.advice(fork).cause
    assert "“one” became “One”" in report.advice(fork).cause
    one, two = report.session.calls
    at = fork.tokens.position
    assert one.sequence[:at] == two.prompt_ids[:at]
    assert (proxy.renderer.decode([fork.tokens.theirs]), proxy.renderer.decode([fork.tokens.ours])) == ("o", "O")
    near = neighbourhood(report, fork)
    assert near.ours[0].endswith("user\\n")
    assert (near.theirs[1], near.ours[1], near.ours[2][:2]) == ("o", "O", "ne")
    assert fork.cost_tokens == len(one.sequence) - 1  # all but the “o”
    assert report.figures.merge_rate == 0.0


def test_a_system_prompt_that_changes_every_turn(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [says("system", "It is 10:02."), U1])
    ask(session, [says("system", "It is 10:03."), U1, a1, U2])
    report = examine(session)
    advice = report.advice(the_fork(report, "history_edited"))
    assert "message 1 (system)" in advice.cause
    assert "out of the system prompt" in advice.todo


def test_instructions_of_the_first_call_alone_are_named(proxy, examine):
    """The Responses API's instructions do not carry over."""
    sdk, session = proxy.sdk, proxy.session()
    first = sdk(session).responses.create(model="test", input="one", instructions="be brief")
    sdk(session).responses.create(model="test", input="two", previous_response_id=first.id)
    report = examine(session)
    advice = report.advice(the_fork(report, "history_edited"))
    assert (advice.cause, advice.certain) == ("the client left out the system message that was message 1", True)
    assert "instructions, which do not carry over" in advice.todo


def test_an_edited_answer(proxy, ask, examine):
    session = proxy.session()
    ask(session, [U1], " padded ")
    ask(session, [U1, says("assistant", "padded"), U2])
    report = examine(session)
    cause = report.advice(the_fork(report, "history_edited")).cause
    assert "message 2 (assistant): it is not what was sampled: “ padded ” became “padded”" in cause


def test_changed_arguments(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [U1], CALL, [ADD])
    call = a1["tool_calls"][0]
    changed = call | {"function": call["function"] | {"arguments": json.dumps({"a": 1, "b": 2})}}
    ask(session, [U1, a1 | {"tool_calls": [changed]}, says("tool", "3", tool_call_id=call["id"])], tools=[ADD])
    report = examine(session)
    cause = report.advice(the_fork(report, "arguments_changed")).cause
    assert 'add({"a":1})' in cause
    assert 'add({"a": 1, "b": 2})' in cause


def test_changed_call_ids_where_the_tokens_differ_too(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [U1], 'add( {"a":1} )', [ADD])  # sent back, it is spelled otherwise
    renamed = [a1["tool_calls"][0] | {"id": "mine"}]
    ask(session, [U1, a1 | {"tool_calls": renamed}, says("tool", "3", tool_call_id="mine")], tools=[ADD])
    report = examine(session)
    assert "changed a tool call's id in message 2" in report.advice(the_fork(report, "call_ids_changed")).cause


def test_a_truncated_answer(proxy, ask, examine):
    session = proxy.session()
    cut = proxy.says("dé", end=False)[:-1]  # in the middle of a character
    proxy.engine.enqueue(Reply(cut, finish_reason="length"))
    reply = proxy.sdk(session).chat.completions.create(model="test", messages=[U1])
    ask(session, [U1, reply.choices[0].message.model_dump(exclude_none=True), U2])
    report = examine(session)
    assert "cut off before its end" in report.advice(the_fork(report, "truncated")).cause


def test_a_truncated_answer_behind_a_kept_turn(proxy, ask, examine):
    """It still extends the turn before; that the last one is lost has its reason and its cost."""
    session = proxy.session()
    a1 = ask(session, [U1])
    cut = proxy.says("dé", end=False)[:-1]
    proxy.engine.enqueue(Reply(cut, finish_reason="length"))
    reply = proxy.sdk(session).chat.completions.create(model="test", messages=[U1, a1, U2])
    ask(session, [U1, a1, U2, reply.choices[0].message.model_dump(exclude_none=True), U3])
    report = examine(session)
    fork = the_fork(report, "truncated")
    assert (fork.call.parent.number, fork.tokens.other.number) == (1, 2)
    assert fork.cost_tokens > 0
    assert (report.figures.extending, report.figures.continuing) == (1, 2)


def test_raw_ids_of_a_truncated_answer(proxy, examine):
    session = proxy.session()
    client = proxy.sdk(session)
    proxy.engine.enqueue(Reply(proxy.says("dé", end=False)[:-1], finish_reason="length"))
    prompt = proxy.renderer.encode("Q: how many? A:")
    text = client.completions.create(model="default", prompt=prompt, max_tokens=9).choices[0].text
    client.completions.create(model="default", prompt=[*prompt, *proxy.renderer.encode(text + " Q:")], max_tokens=4)
    the_fork(examine(session), "truncated")


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        ([U1, "a1", "a2", U3], "the client dropped message 3 (user): “two”"),
        (
            [U1, "a1", U2, says("user", "mind"), "a2", U3],
            "the client inserted a new message at message 4 (user): “mind”",
        ),
        ([U2, "a1", U1, "a2", U3], "the client moved message 1 (user): “one”"),
        ([U1, U2, "a2", U3], "the client dropped message 2 (assistant): “first answer”"),
    ],
)
def test_a_message_that_is_dropped_moved_or_put_in_is_named(proxy, ask, examine, sent, cause):
    session = proxy.session()
    a1 = ask(session, [U1], "first answer")
    a2 = ask(session, [U1, a1, U2], "second answer")
    answers = {"a1": a1, "a2": a2}
    ask(session, [answers[message] if isinstance(message, str) else message for message in sent])
    report = examine(session)
    fork = the_fork(report, "history_edited")
    assert fork.cost_tokens > 0
    assert report.advice(fork).cause == cause


def test_a_turn_that_is_dropped_behind_a_kept_one_is_named(proxy, ask, examine):
    session = proxy.session()
    talk = [U1]
    for text in ("first answer", "second answer", "third answer"):
        talk += [ask(session, talk, text), says("user", f"and then, after {text}?")]
    del talk[3]
    ask(session, talk)
    report = examine(session)
    fork = the_fork(report, "history_edited")
    assert report.advice(fork).cause == "the client dropped message 4 (assistant): “second answer”"
    assert fork.call.parent.number == 1
    assert fork.tokens.other.number == 3
