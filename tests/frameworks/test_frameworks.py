"""Official SDKs and agent frameworks, unchanged, on real SGLang: what they leave behind is token-exact.

Every program plays the same conversation of two questions, each answered by a tool call and then in words, with its
framework's own loop, tools and history. The model is sampled at temperature 1, so an episode may go wrong; it is
played again in a session of its own, and exactness is asserted of every episode, the failed ones too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from arena import Arena, Episode

from agentrl.domain.schemas import PROMPT_VERSION, ForkReason, Role
from agentrl.rendering import load_renderer
from agentrl.store.audit import run_audit

ToolCalls = list[tuple[str, str]]

pytestmark = pytest.mark.engine
ATTEMPTS = 4
EXPECTED = ["Answer: 47", "Answer: 94"]
CALLS = [("calc", '{"expression": "12+35"}'), ("calc", '{"expression": "47*2"}')]
PROGRAMS = [
    "openai_chat sdk",
    "openai_responses stateful",
    "openai_responses stateless",
    "anthropic_messages sdk",
    "openai_agents responses",
    "openai_agents server",
    "openai_agents chat",
    "langgraph_agent openai",
    "langgraph_agent responses",
    "langgraph_agent anthropic",
    "pydantic_ai_agent chat",
    "pydantic_ai_agent responses",
    "pydantic_ai_agent anthropic",
]


def played(arena: Arena, program: str, answers: list[str], calls: ToolCalls | None = None) -> list[Episode]:
    """The program, whole and streamed, at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda stream: succeeding(arena, program, stream, answers, calls), (False, True)))


def succeeding(arena: Arena, program: str, stream: bool, answers: list[str], calls: ToolCalls | None) -> Episode:
    """Play until the agent answered both questions as expected, by the expected calls; every episode is checked."""
    for _ in range(ATTEMPTS):
        episode = arena.play(program, stream)
        check_exact(episode)
        if episode.answers == answers and calls in (None, tool_calls(episode)):
            # Text comes in pieces when it is streamed, each of the answers in more than one.
            assert episode.pieces > len(answers) if stream else episode.pieces == 0
            return episode
    raise AssertionError(
        f"{program} answered {episode.answers} by {tool_calls(episode)} in {ATTEMPTS} attempts: {episode.error}"
    )


def check_exact(episode: Episode) -> None:
    """Every call is complete, and what is recorded and built is what went to and came from the engine."""
    assert episode.status == "completed", episode.error
    assert episode.calls, episode.error
    by_id = {call["id"]: call for call in episode.calls}
    exchanges = list(episode.engine)
    for call in episode.calls:
        assert call["status"] == "complete", call["error"]
        n = call["output_tokens"]
        assert 0 < n == len(call["output_ids"]) == len(call["logprobs"])
        assert all(logprob <= 0 for logprob in call["logprobs"])
        assert call["version_spans"] == [[0, 0, n]]
        sent = [token for token, _, _ in sequence(by_id, call)[:-n]]
        found = [e for e in exchanges if (e.input_ids, e.output_ids) == (sent, call["output_ids"])]
        assert found, f"{call['id']}: the engine heard or said something else"
        assert call["logprobs"] == pytest.approx(found[0].logprobs)
        exchanges.remove(found[0])
    assert exchanges == [], "the engine sampled what is not recorded"

    parents = {call["parent_id"] for call in episode.calls}
    leaves = [call for call in episode.calls if call["id"] not in parents]
    built = sorted(
        list(zip(t.input_ids.tolist(), t.logprobs.tolist(), t.versions.tolist(), strict=True))
        for t in episode.trajectories
    )
    assert built == sorted(sequence(by_id, leaf) for leaf in leaves)
    assert any(logprob < 0 for tokens in built for _, logprob, _ in tokens)
    trained = [
        call for call in episode.calls if "structural_tag" not in call["params"]
    ]  # a grammar bends the distribution
    assert set(episode.states) == {"ready" if trained else "rejected"}
    owned = sum(int(tokens.loss_mask.sum()) for tokens in episode.trajectories)
    assert owned == sum(call["output_tokens"] for call in trained)


def sequence(by_id: dict, call: dict) -> list[tuple[int, float, int]]:
    """(id, logprob, version) of a call's prompt and output, put together from what it and those before it added."""
    before = sequence(by_id, by_id[call["parent_id"]]) if call["parent_id"] else []
    prompt = [(token, 0.0, PROMPT_VERSION) for token in call["prompt_delta_ids"]]
    sampled = [(token, logprob, 0) for token, logprob in zip(call["output_ids"], call["logprobs"], strict=True)]
    return before + prompt + sampled


def tool_calls(episode: Episode) -> ToolCalls:
    """(name, arguments) of every tool call that the model made."""
    return [
        (made["function"]["name"], made["function"]["arguments"])
        for call in episode.calls
        for made in call["answer"].get("tool_calls") or []
    ]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_agent_leaves_one_exact_trajectory(arena: Arena, caller_model: Path, program: str) -> None:
    renderer = load_renderer(caller_model)
    for episode in played(arena, program, EXPECTED, CALLS):
        prompts = [renderer.decode(call["prompt_delta_ids"]) for call in episode.calls]
        assert len(prompts) == 4
        assert "tool\n47<|im_end|>" in prompts[1]
        assert "tool\n94<|im_end|>" in prompts[3]
        assert episode.forks == []
        assert len(episode.trajectories) == 1


def test_raw_prompts_that_grow_leave_one_exact_trajectory(arena: Arena) -> None:
    """Completions: the program writes the prompt and reads the tool call out of the text."""
    said = ["calc(12+35)", EXPECTED[0], "calc(47*2)", EXPECTED[1]]
    for episode in played(arena, "openai_completions sdk", EXPECTED):
        assert [call["answer"]["content"] for call in episode.calls] == said
        assert episode.forks == []
        assert len(episode.trajectories) == 1


def test_an_agent_behind_a_tool_is_a_branch_of_its_own(arena: Arena) -> None:
    """The Agents SDK runs it in the same session: a fork by another agent, and the main agent is one trajectory."""
    for episode in played(arena, "openai_agents subagent", EXPECTED):
        by_role = {
            role: [call for call in episode.calls if call["role"] == role] for role in (Role.MAIN, Role.SUBAGENT)
        }
        assert [call["answer"]["content"] for call in by_role[Role.SUBAGENT]] == ["47", "94"]
        assert [call["bridged"] for call in by_role[Role.MAIN]] == [False, True, True, True]
        assert [call["fork_reason"] for call in by_role[Role.SUBAGENT]] == ["other_agent", "new_conversation"]
        assert len(episode.trajectories) == 3


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_smolagents_writes_its_history_anew(arena: Arena, choice: str) -> None:
    """It sends tool calls and results back as text: no call extends an earlier one, and each fork says why.

    It asks for a tool call every time, which here takes a grammar, whose calls are not trained; with `auto` they are.
    """
    for episode in played(arena, f"smolagents_agent {choice}", ["47", "94"]):
        assert [name for name, _ in tool_calls(episode)] == ["calc", "final_answer"] * 2
        assert {"structural_tag" in call["params"] for call in episode.calls} == {choice == "required"}
        assert len(episode.trajectories) == len(episode.calls) == 4
        assert episode.forks == [ForkReason.HISTORY_EDITED] * 3


def test_the_audit_finds_no_violation(arena: Arena) -> None:
    with arena.database.read() as conn:
        assert list(run_audit.scan(conn, arena.run_id)) == []
