"""Programs that play one episode, as real processes, and the verdict on each."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.diagnosis import report
from agentrl.diagnosis.report import Report
from agentrl.doctor import trial
from agentrl.errors import UserError
from agentrl.testing import Reply

AGENT = """
import json, os, urllib.request
def post(path, body, base=os.environ["OPENAI_BASE_URL"]):
    head = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request, timeout=30))
def ask(messages, **options):
    return post("/chat/completions", {"model": "default", "messages": messages, **options})["choices"][0]["message"]
def user(text):
    return {"role": "user", "content": text}
talk = [user("hello")]
"""
TURNS = """
for turn in range(4):
    talk.append(ask(talk))
    EDIT
    talk.append(user("go on"))
"""


@pytest.fixture
def play(proxy: Any) -> Any:
    """The report on an episode of a Python program."""

    def run(program: str, *, keep: bool = True, preamble: str = AGENT) -> Report:
        command = [sys.executable, "-c", preamble + program]
        played = asyncio.run(trial.play(command, proxy.url, "run-key", keep=keep))
        return report.make(played.session, proxy.renderer.decode, played.status)

    return run


def test_an_agent_that_only_appends_is_trainable(play):
    found = play(TURNS.replace("EDIT", "") + 'post("/reward", {"value": 1.0}, os.environ["ANTHROPIC_BASE_URL"])')
    assert (found.verdict.answer, found.verdict.problems, found.verdict.notes) == ("trainable", [], [])
    f = found.figures
    assert (f.calls, f.trajectories, f.merge_rate, f.ids, f.logprobs, f.versions) == (4, 1, 1.0, 1.0, 1.0, 1.0)
    assert f.trainable_tokens == f.sampled_tokens == 16
    assert (found.session.status, found.command_status) == ("completed", 0)


def test_an_agent_that_strips_its_answers_gets_that_advice(play, proxy):
    proxy.engine.enqueue(*(proxy.says(" padded ") for _ in range(4)))
    found = play(TURNS.replace("EDIT", 'talk[-1]["content"] = talk[-1]["content"].strip()'))
    assert found.verdict.answer == "trainable, with problems"
    assert (
        "only 0 of 3 calls extend an earlier one; history edited 3 times, first at call 2" in found.verdict.problems[0]
    )
    assert "edited message 2 (assistant)" in found.verdict.problems[0]


def test_an_agent_that_never_calls(play):
    found = play("")
    assert found.verdict.answer == "not trainable"
    assert "no call reached the proxy" in found.verdict.problems[0]


def test_an_agent_that_changes_the_distribution_of_every_call_is_not_trainable(play):
    found = play("ask(talk, top_p=0.5); ask(talk, top_k=3)")
    assert found.verdict.answer == "not trainable"
    assert "2 sampled from another distribution than the policy's (leave out top_p" in found.verdict.problems[0]
    assert (found.figures.modified, found.figures.untrainable_tokens) == (2, found.figures.sampled_tokens)


def test_an_agent_that_asks_for_greedy_answers_explores_all_the_same(play):
    """A run forces its temperature on training sessions, and the verdict is about those."""
    found = play("ask(talk, temperature=0)")
    assert (found.verdict.answer, found.figures.greedy) == ("trainable", 0)


def test_an_agent_with_side_calls_alone_is_not_trainable(play, proxy):
    head = AGENT.replace(
        '"Bearer " + os.environ["OPENAI_API_KEY"]', '"Bearer " + os.environ["OPENAI_API_KEY"], "X-Turn-Type": "side"'
    )
    found = play("ask(talk)", preamble=head)
    assert "1 are side calls without a reward" in found.verdict.problems[0]


def test_an_agent_whose_calls_are_refused(play, proxy):
    proxy.engine.enqueue(Reply(error="no such thing"))
    found = play("ask(talk)")
    assert found.verdict.answer == "not trainable"
    assert "no answer of the policy was delivered: 1 failed" in found.verdict.problems[0]
    assert "no such thing" in found.verdict.problems[0]
    assert (found.command_status, found.session.status) == (1, "failed")


TRY = """
import urllib.error
def attempt(path="/chat/completions", **options):
    try:
        post(path, {"model": "default", "messages": talk, **options})
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def test_an_agent_whose_calls_never_begin_is_told_what_was_refused_and_how_to_fix_it(play):
    found = play(TRY + 'attempt(model="claude-x"); attempt(model="claude-x"); attempt(max_tokens=1 << 20)')
    assert found.verdict.answer == "not trainable"
    model, context = found.verdict.problems
    assert model.startswith("2 calls were refused (404): no model 'claude-x'")
    assert model.endswith(": name it 'default'")
    assert context.startswith("1 call was refused (400): This model's maximum context length is ")
    assert context.endswith(": ask for fewer tokens (max_tokens), or shorten the conversation")


def test_refusals_beside_answers_are_a_note(play):
    found = play(TRY + "ask(talk); attempt(suffix=1)")
    assert found.verdict.answer == "trainable"
    expected = "1 call was refused (400): parameter 'suffix' is not supported: leave it out"
    assert found.verdict.notes[0] == expected


def test_a_wrong_address_is_reported(play):
    found = play(TRY + 'attempt("/v1/chat/completions")')
    assert "there is no route POST" in found.verdict.problems[0]
    assert "base_url ends in one /v1, not in two" in found.verdict.problems[0]


def test_an_agent_that_fails_after_its_calls(play):
    found = play("ask(talk); raise SystemExit(3)")
    assert found.verdict.answer == "trainable, with problems"
    assert "the command ended with exit status 3" in found.verdict.problems


def test_a_retry_and_an_equal_call_are_counted(play):
    again = AGENT.replace(
        '"Bearer " + os.environ["OPENAI_API_KEY"]',
        '"Bearer " + os.environ["OPENAI_API_KEY"], "x-stainless-retry-count": "1"',
    )
    found = play("ask(talk); ask(talk); ask(talk, n=2)", preamble=again)
    assert (found.figures.retries, found.figures.repeated, found.figures.forks) == (4, 1, 0)


def test_an_examination_at_another_run_leaves_nothing_to_train(play, proxy):
    found = play("ask(talk)", keep=False)
    assert found.verdict.answer == "trainable"
    assert proxy.get(f"/sessions/{found.session.id}")["status"] == "abandoned"
    run = proxy.get("/api/run")
    assert (run["trajectories"], run["running"]) == ({}, 0)


def test_the_official_sdk_finds_the_session_by_its_environment(play, capfd):
    program = """
from openai import OpenAI
model = OpenAI()
model.chat.completions.create(model="default", messages=[{"role": "user", "content": "hello"}])
from agentrl.client import Client
with Client() as client, client.session() as sub:
    print(sub.id)
    OpenAI(base_url=sub.base_url, api_key=sub.api_key).chat.completions.create(
        model="default", messages=[{"role": "user", "content": "sum up"}]
    )
"""
    found = play(program, preamble="")
    assert found.verdict.answer == "trainable"
    (subagent,) = found.subagents
    assert capfd.readouterr().out == f"{subagent.session.id}\n"
    assert (subagent.session.parent_id, subagent.figures.delivered) == (found.session.id, 1)


def test_a_program_that_does_not_exist(proxy):
    with pytest.raises(UserError, match="cannot run 'no-such-program': No such file"):
        asyncio.run(trial.play(["no-such-program"], proxy.url, "run-key", keep=True))
    assert proxy.get("/api/run")["running"] == 0


def test_a_stopped_episode_ends_its_program_and_gives_the_session_up(proxy, tmp_path: Path):
    mark = tmp_path / "pid"
    program = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def stop() -> None:
        task = asyncio.create_task(trial.play([sys.executable, "-c", program], proxy.url, "run-key", keep=True))
        while not (mark.exists() and mark.read_text()):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert proxy.get("/api/run")["running"] == 0


def test_a_program_that_ignores_sigterm_is_killed(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(trial, "KILL_AFTER_S", 0.2)
    mark = tmp_path / "ready"
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(mark)!r}, 'w').close(); time.sleep(600)"
    )

    async def stop() -> None:
        task = asyncio.create_task(trial.run([sys.executable, "-c", program], {}))
        while not mark.exists():  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())  # or it would wait for the program
