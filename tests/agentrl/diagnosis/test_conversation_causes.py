"""Compaction, other agents, new conversations, branches and raw prompts, and what the doctor says of them."""

from __future__ import annotations

import re

import pytest

from agentrl.diagnosis.report import neighbourhood

from .reported_forks import ADD, FIND, U1, U2, U3, S, on_screen, says, the_fork


def test_changed_tools(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [S, U1], tools=[ADD])
    ask(session, [S, U1, a1, U2], tools=[ADD, FIND])
    report = examine(session)
    assert report.advice(the_fork(report, "tools_changed")).cause.endswith("the tools are not: with find")


def test_compaction_by_a_sliding_window(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [S, U1], "first")
    a2 = ask(session, [S, U1, a1, U2], "second")
    ask(session, [S, U2, a2, U3])
    report = examine(session)
    advice = report.advice(the_fork(report, "compacted"))
    assert advice.certain
    assert "left out or replaced by a summary, from message 2 on" in advice.cause


def test_compaction_by_a_summary_is_reported_as_probable(proxy, ask, examine):
    session = proxy.session()
    summary = "They have one apple and want two more."
    a1 = ask(session, [S, U1])
    ask(session, [S, U1, a1, says("user", "sum up")], summary)
    ask(session, [S, says("user", f"So far: {summary}")])
    report = examine(session)
    assert not report.advice(the_fork(report, "compacted")).certain


@pytest.mark.parametrize("summarizer", [None, says("system", "you sum up")])
def test_the_call_that_writes_the_summary_is_left_out_of_the_merge_rate(proxy, ask, examine, summarizer):
    """It has no tools, or another system prompt, so it extends nothing; only what quotes it tells what it was."""
    session = proxy.session()
    summary = "They have one apple and want two more."
    a1 = ask(session, [S, U1], tools=[ADD])
    a2 = ask(session, [S, U1, a1, U2], tools=[ADD])
    ask(session, [summarizer or S, U1, a1, U2, a2, says("user", "sum up")], summary)
    assert {fork.reason for fork in examine(session).forks} <= {"tools_changed", "other_agent"}
    ask(session, [S, says("user", f"So far: {summary}")], tools=[ADD])
    report = examine(session)
    assert [fork.reason for fork in report.forks] == ["summary", "compacted"]
    assert "wrote the summary" in report.advice(report.forks[0]).cause
    assert (report.figures.extending, report.figures.continuing) == (1, 2)
    assert report.forks[0].cost_tokens > 0


def test_a_second_task_that_quotes_the_result_of_the_first_is_new(proxy, ask, examine):
    session = proxy.session()
    result = "They have one apple and want two more."
    ask(session, [S, U1], result)
    ask(session, [S, says("user", f"Translate: {result}")])
    assert the_fork(examine(session), "new_conversation").cost_tokens == 0


@pytest.mark.parametrize(
    ("system", "tools", "role"), [("write a title", None, "side"), ("search the web", [FIND], "subagent")]
)
def test_a_call_of_another_agent_costs_no_tokens(proxy, ask, examine, system, tools, role):
    session = proxy.session()
    ask(session, [S, U1], tools=[ADD])
    ask(session, [says("system", system), U1], tools=tools)
    report = examine(session)
    fork = the_fork(report, "other_agent")
    assert report.advice(fork).cause.endswith(f"it counts as {role}")
    assert fork.cost_tokens == 0
    assert report.figures.merge_rate is None


def test_a_new_conversation_costs_no_tokens(proxy, ask, examine):
    session = proxy.session()
    ask(session, [S, U1])
    ask(session, [S, U2])
    report = examine(session)
    fork = the_fork(report, "new_conversation")
    assert (fork.cost_tokens, report.verdict.answer) == (0, "trainable")


def test_a_branch_is_no_fault_and_parallel_calls_are_no_forks(proxy, ask, examine):
    session = proxy.session()
    a1 = ask(session, [U1])
    ask(session, [U1, a1, U2], "left")
    ask(session, [U1, a1, U2], "again")  # the same prompt
    assert not examine(session).forks
    ask(session, [U1, a1, U3], "right")
    report = examine(session)
    fork = the_fork(report, None)
    assert fork.kind == "branch"
    assert re.search(r"└ 4 .* branch *\n", on_screen(report))
    assert "continued call 1 a second time" in report.advice(fork).cause
    assert (fork.cost_tokens, report.figures.merge_rate, report.figures.trajectories) == (0, 1.0, 3)


def test_raw_prompts_are_conversations_of_their_own_and_told_in_one_line(proxy, examine):
    session = proxy.session()
    client = proxy.sdk(session)
    for i in range(6):
        client.completions.create(model="default", prompt=f"number {i}", max_tokens=4)
    report = examine(session)
    assert [fork.kind for fork in report.forks] == ["new_conversation"] * 5
    text = on_screen(report)
    line = "5 raw prompts (new conversation), each a conversation of its own: call 2, call 3, call 4, call 5, call 6\n"
    assert line in text
    assert text.count(" forks (") == 0
    assert (report.verdict.answer, report.figures.reprocessed_tokens) == ("trainable", 0)


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_raw_prompt_that_leaves_out_the_end_of_the_answer_or_changes_it(proxy, examine, kind):
    session = proxy.session()
    client = proxy.sdk(session)

    def complete(prompt):
        sent = prompt if kind == "text" else proxy.renderer.encode(prompt)
        return client.completions.create(model="default", prompt=sent, max_tokens=9).choices[0].text

    proxy.engine.enqueue(proxy.says("4 apples"))
    question = "Q: how many? A:"
    answer = complete(question)
    complete(f"{question}{answer} Q: and pears?")
    complete(f"{question} four Q: and pears?")
    complete(question)  # once more: no fork
    complete("Q: who? A:")
    report = examine(session)
    assert [fork.kind for fork in report.forks] == ["history_edited", "history_edited", "new_conversation"]
    left_out, changed, _ = report.forks
    cause = report.advice(left_out).cause
    assert cause == "a raw prompt continues call 1 without the token that ended its answer"
    assert cause in on_screen(report)
    assert (neighbourhood(report, left_out).theirs[1], left_out.cost_tokens) == (
        "<|im_end|>",
        len(report.session.calls[0].sequence) - 1,
    )
    cause = report.advice(changed).cause
    assert cause == "a raw prompt begins with the prompt of call 1, and then differs from its answer"
