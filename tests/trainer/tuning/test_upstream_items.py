"""What an upstream answered in a run, as data of SFT."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import make_run
from pydantic import ValidationError

from agentrl.configs.config_files import validated
from agentrl.configs.tuning_config import SftConfig
from agentrl.domain.schemas import InteractionStatus, Json, Role, SessionStatus
from agentrl.domain.tokens import TokenIds
from agentrl.errors import ConfigError, UserError
from agentrl.models import resolve_model
from agentrl.rendering import load_renderer
from agentrl.store import Database
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts, session_limits, session_usage
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import rewards
from agentrl.store.training.paths.upstream_answers import UpstreamAnswer
from agentrl.trainer.tuning.encoding import encode
from agentrl.trainer.tuning.source import load_data
from agentrl.trainer.tuning.upstream_items import message_of

TINY = resolve_model("tiny")
LIMITS = session_limits.Limits(
    group_size=2,
    min_group_size=2,
    max_concurrent_groups=100,
    max_staleness=10,
    groups_per_step=100,
    turn_discount=1.0,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)


def asks(*texts: str) -> list[Json]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def says(text: str, finish: str = "stop") -> Json:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


def answer(conn: Any, run_id: str, session_id: str, messages: list[Json], given: Json, **changes: Any) -> None:
    call_id = codec.new_id()
    call_intents.begin(
        conn,
        call_intents.Intent(
            id=call_id,
            run_id=run_id,
            session_id=session_id,
            parent_id=None,
            dialect=changes.get("dialect", "openai.chat"),
            role=Role.UPSTREAM,
            digest="d",
            replica="r",
            params={},
            temperature=0.0,
            tools=None,
            options={"upstream": changes.get("upstream", "big"), "model": "m"},
            fork_reason=None,
            bridged=False,
            distribution_modified=False,
            trainable=False,
            prompt_tokens=0,
            prompt_digest=TokenIds().digest,
            created_at=time.time(),
        ),
    )
    outcome = call_outcomes.Outcome(
        status=InteractionStatus.COMPLETE,
        conversation_key=b"",
        new_messages=messages,
        answer=given,
        prompt_delta_ids=[],
        output_ids=[],
        logprobs=[],
        spans=[],
        finish_reason="stop",
        engine_url="http://u",
        cached_tokens=None,
        first_token_at=None,
    )
    session_usage.finish_upstream(conn, call_id, session_id, outcome, 3)


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run `test`: a group of two sessions with rewards 0 and 1, and one whose sessions failed."""
    monkeypatch.delenv("AGENTRL_DATABASE_URL", raising=False)
    (tmp_path / "test").mkdir()
    database = Database(f"sqlite:///{tmp_path}/test/agentrl.db")
    database.upgrade()
    run_id = make_run(database, steps=1)
    for status in (SessionStatus.COMPLETED, SessionStatus.FAILED):
        with database.write() as conn:
            new = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id() for _ in range(2)])
            for value, session_id in enumerate(new.session_ids):
                answer(conn, run_id, session_id, asks("ab"), says(f"b{value}"))
                answer(conn, run_id, session_id, asks("ab", f"b{value}", "cd"), says("dc"))
                answer(conn, run_id, session_id, asks("long"), says("cut", "length"))
                answer(conn, run_id, session_id, asks("x"), {"content": []}, dialect="anthropic.messages")
                answer(conn, run_id, session_id, asks("judge"), says("1"), upstream="judge")
                rewards.add(conn, session_id, value=float(value), discount=1.0)
                sealing.end(conn, session_id, status, None, LIMITS)
    database.close()
    return tmp_path


def configured(runs_dir: Path, **data: Any) -> SftConfig:
    found = {"name": "n", "model": "tiny", "runs_dir": runs_dir, "data": {"run": "test", "upstream": "big"} | data}
    return validated(found, SftConfig)


def test_each_complete_answer_is_trained_once_in_the_students_tokens(runs_dir: Path) -> None:
    data = load_data(configured(runs_dir), TINY)
    renderer = load_renderer(TINY)
    assert [len(item) for item in data.train] == [2, 2]
    expected = set()
    for value in range(2):
        for talk, first in ((asks("ab", f"b{value}"), 1), (asks("ab", f"b{value}", "cd", "dc"), 3)):
            (one,) = encode(renderer, talk, first=first)
            expected.add((tuple(one.tokens.input_ids.tolist()), tuple(one.tokens.loss_mask.tolist())))
    found = [sample.tokens for item in data.train for sample in item]
    assert {(tuple(t.input_ids.tolist()), tuple(t.loss_mask.tolist())) for t in found} == expected
    for item in data.train:
        assert len({sample.tokens.group_id for sample in item}) == 1  # what they share is computed once
    assert data.notes == ["left out 4 answers that are no complete messages of Chat Completions"]


def test_rewards_choose_sessions(runs_dir: Path) -> None:
    for data in ({"best_of_group": 1}, {"min_reward": 0.5}):
        (item,) = load_data(configured(runs_dir, **data), TINY).train
        assert {sample.tokens.episode_return for sample in item} == {1.0}


def test_an_upstream_without_answers_is_refused_by_name(runs_dir: Path) -> None:
    with pytest.raises(UserError, match=r"data\.upstream: 'bigger' has answered nothing in completed sessions"):
        load_data(configured(runs_dir, upstream="bigger"), TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"file": "x.jsonl", "upstream": "big"}}, "upstream applies to a run's trajectories, not to a file"),
        ({"data": {"run": "r", "upstream": "big", "min_version": 1}}, "min_version applies to the policy's"),
        ({"data": {"run": "r", "upstream": "big"}, "loss": "forward_kl"}, "an upstream gives text"),
    ],
)
def test_what_does_not_go_with_an_upstream_is_refused(changes: Any, message: str) -> None:
    with pytest.raises((ValidationError, ConfigError), match=message):
        validated({"name": "n", "model": "tiny"} | changes, SftConfig)


def given(answered: Json, dialect: str = "openai.chat") -> UpstreamAnswer:
    return UpstreamAnswer(
        call_id="c", session_id="s", group_id="g", dialect=dialect, tools=None, messages=[], answer=answered, reward=0.0
    )


def chunk(delta: Json, finish: str | None = None, index: int = 0) -> Json:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "He"}),
    chunk({"content": "other choice"}, index=1),
    chunk({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}]}),
    chunk({"content": "llo"}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}),
    chunk({}, "tool_calls"),
    {"choices": [], "usage": {"completion_tokens": 3}},
    "[DONE]",
]


def test_a_stream_is_the_message_that_its_parts_make() -> None:
    assert message_of(given({"events": STREAM})) == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize(
    "answered",
    [
        says("cut", "length"),
        says("", "stop"),
        says("no", "content_filter"),
        {"choices": []},
        {"choices": [7]},
        {"error": {"message": "x"}},
        {"events": STREAM[:8]},
        {"events": []},
        {"events": [chunk({"tool_calls": [5, {"function": 3}, {"function": {"name": 1}}]}), chunk("x")]},
    ],
)
def test_what_is_no_complete_message_is_left_out(answered: Json) -> None:
    assert message_of(given(answered)) is None
    assert message_of(given(says("yes"), "openai.responses")) is None
    assert message_of(given(says("yes"))) == {"role": "assistant", "content": "yes"}
