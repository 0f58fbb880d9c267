"""The conversation of a task."""

from __future__ import annotations

import pytest

from agentrl.errors import UserError
from agentrl.rollout.agent import load_agent
from agentrl.rollout.answering.task_messages import messages_of

USER = {"role": "user", "content": "2+2?"}


def test_a_text_is_a_user_message_and_messages_stay() -> None:
    assert messages_of({"prompt": "2+2?"}) == [USER]
    assert messages_of({"prompt": [USER]}) == messages_of({"messages": [USER], "prompt": "x"}) == [USER]
    assert messages_of({"question": "2+2?"}, system="sum") == [{"role": "system", "content": "sum"}, USER]
    own = [{"role": "system", "content": "own"}, USER]
    assert messages_of({"messages": own}, system="sum") == own


def test_a_template_is_filled_with_the_task() -> None:
    assert messages_of({"a": 2, "b": {"c": "x"}}, template="{a}+{a}?") == [USER]
    with pytest.raises(UserError, match=r"agent_args\.template: .*'d'"):
        messages_of({"a": 2}, template="{d}")


@pytest.mark.parametrize("task", [{}, {"prompt": 7}, {"messages": ["x"]}, {"prompt": [{"content": "x"}]}])
def test_a_task_without_a_conversation_is_refused(task: dict) -> None:
    with pytest.raises(UserError, match="the task"):
        messages_of(task)


def test_ready_made_agents_are_loaded_by_name() -> None:
    assert type(load_agent(None, {}, scored=True)).__name__ == "SingleTurn"
    assert type(load_agent("multi_turn", {"max_turns": 2}, scored=True)).__name__ == "MultiTurn"
    with pytest.raises(UserError, match="agent: multi_turn needs `reward`"):
        load_agent("multi_turn", {})
    with pytest.raises(UserError, match="reward: not supported for a command"):
        load_agent(["true"], {}, scored=True)
    with pytest.raises(UserError, match="did you mean 'multi_turn'"):
        load_agent("multiturn", {}, scored=True)
    with pytest.raises(UserError, match="max_turns: must be at least 1"):
        load_agent("multi_turn", {"max_turns": 0}, scored=True)
