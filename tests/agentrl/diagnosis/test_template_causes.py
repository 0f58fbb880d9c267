"""Forks by a chat format that changes what it has written, and what the doctor says of them."""

from __future__ import annotations

import json
import shutil
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from agentrl.diagnosis.report import neighbourhood

from .reported_forks import ADD, U1, U2, says, the_fork


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
