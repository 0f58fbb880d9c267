"""A conversation of two questions, each answered by a tool call and then in words, and what it must leave behind.

Every program of `programs` plays it, with its framework's own loop, tools and history. The model is sampled at
temperature 1, so an episode may go wrong; it is played again in a session of its own, and exactness is asserted of
every episode, the failed ones too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from arena import Arena, Episode

from agentrl.domain.schemas import PROMPT_VERSION
from agentrl.rendering import load_renderer

ToolCalls = list[tuple[str, str]]

ATTEMPTS = 4
EXPECTED = ["Answer: 47", "Answer: 94"]
CALLS = [("calc", '{"expression": "12+35"}'), ("calc", '{"expression": "47*2"}')]


def check_one_trajectory(arena: Arena, model: Path, program: str) -> None:
    """The program, whole and streamed, leaves one trajectory without a fork."""
    renderer = load_renderer(model)
    for episode in played(arena, program, EXPECTED, CALLS):
        prompts = [renderer.decode(call["prompt_delta_ids"]) for call in episode.calls]
        assert len(prompts) == 4
        assert "tool\n47<|im_end|>" in prompts[1]
        assert "tool\n94<|im_end|>" in prompts[3]
        assert episode.forks == []
        assert len(episode.trajectories) == 1


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
