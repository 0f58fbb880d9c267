"""Each kind of fork, made by a client over real HTTP, and what the doctor says of it."""

from __future__ import annotations

import io
import json
import re
import shutil
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from agentrl.console import Console
from agentrl.diagnosis.report import Report, neighbourhood
from agentrl.doctor.show import show
from agentrl.testing import Reply

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALL = 'add({"a":1})'


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


S, U1, U2, U3 = says("system", "be brief"), says("user", "one"), says("user", "two"), says("user", "three")


def the_fork(report: Report, reason: str | None) -> Any:
    """The only fork; what a person reads of it is on the screen."""
    (fork,) = report.forks
    assert fork.reason == reason
    assert report.advice(fork).cause in on_screen(report)
    return fork


def on_screen(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    return out.getvalue()


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


def call_without_text(proxy: Any, session: Any, turns: int, *others: Any) -> None:
    """An agent that calls a tool in each turn, whose framework keeps the calls and drops the text beside them.

    Each turn is served by the next replica.
    """
    wanted = 'I will add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    talk, replicas = [U1], cycle([proxy, *others])
    for replica in islice(replicas, turns):
        proxy.engine.enqueue(proxy.renderer.encode(wanted))
        url = f"{replica.url}/sessions/{session['session_id']}/v1"
        completions = replica.sdk(session | {"base_url": url}).chat.completions
        answer = completions.create(model="test", messages=talk, tools=[ADD]).choices[0].message
        assert answer.content == "I will add."
        call = answer.tool_calls[0]
        talk += [
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude_none=True)]},
            says("tool", "3", tool_call_id=call.id),
        ]


class TestTemplates:
    """Models whose chat format changes what it has written."""

    @pytest.fixture
    def chat_template(self) -> str:
        return "{{ messages | length }}" + (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )

    @pytest.fixture
    def renderer_name(self) -> str:
        return "template"

    @pytest.fixture
    def tiny_model(self, tiny_model: Path, tmp_path: Path, chat_template: str, renderer_name: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "chat_template.jinja").write_text(chat_template)
        (folder / "renderer.json").write_text(json.dumps({"renderer": renderer_name}))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        names = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
        tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
        return folder

    def test_a_template_that_rewrites_earlier_turns(self, proxy, ask, examine):
        session = proxy.session()
        a1 = ask(session, [U1])
        ask(session, [U1, a1, U2])
        report = examine(session)
        fork = the_fork(report, "template_rewrote")
        assert fork.tokens.position == 0
        assert (neighbourhood(report, fork).theirs[1], neighbourhood(report, fork).ours[1]) == ("1", "3")
        assert "extend an earlier one; template rewrote 1 times" in report.verdict.problems[0]

    @pytest.mark.parametrize("renderer_name", ["qwen3"])
    def test_a_family_that_drops_reasoning(self, proxy, ask, examine):
        session = proxy.session()
        proxy.engine.enqueue(proxy.renderer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>"))
        reply = proxy.sdk(session).chat.completions.create(model="test", messages=[U1])
        a1 = reply.choices[0].message.model_dump(exclude_none=True)
        assert a1["reasoning_content"].strip() == "hm"
        ask(session, [U1, a1, U2])
        report = examine(session)
        assert "leaves the reasoning out" in report.advice(the_fork(report, "reasoning_dropped")).cause

    @pytest.mark.parametrize("renderer_name", ["qwen3"])
    def test_text_that_is_dropped_beside_tool_calls_is_named(self, proxy, examine):
        session = proxy.session()
        call_without_text(proxy, session, 2)
        report = examine(session)
        assert [fork.reason for fork in report.forks] == ["text_dropped"]
        advice = report.advice(report.forks[0])
        assert "message 2 back without the text beside it" in advice.cause
        assert "proxy.restore_dropped_text" in advice.todo
        assert report.forks[0].cost_tokens > 0

    @pytest.mark.parametrize("renderer_name", ["qwen3"])
    @pytest.mark.parametrize("restored", [True])
    def test_text_that_is_dropped_extends_the_recorded_turn_where_it_is_asked_for(self, proxy, second, examine):
        session = proxy.session()
        call_without_text(proxy, session, 3, second)
        report = examine(session)
        assert not report.forks
        assert report.figures.merge_rate == 1.0
        assert proxy.renderer.decode(report.session.calls[-1].prompt_ids).count("I will add.") == 2

    @pytest.fixture
    def restored(self) -> bool:
        return False

    @pytest.fixture
    def run_config(self, run_config, restored):
        return run_config | {"proxy": {"restore_dropped_text": restored}}
