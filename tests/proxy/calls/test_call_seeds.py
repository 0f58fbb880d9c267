"""With `engine.deterministic` the same call of the same place in a run has the same seed in every run."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.domain.evaluation import Episode, Label
from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.call_seeds import call_seed
from agentrl.testing.fake_engine import Reply

ASKED: list[Any] = [{"role": "user", "content": "ab"}]


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {"engine": {"deterministic": True}}


def seed_of(request: dict[str, Any], place: str, number: int = 0) -> int:
    return call_seed(0, place, TokenIds(request["input_ids"]).digest, number)


def sent(request: dict[str, Any]) -> Any:
    return request["sampling_params"]["sampling_seed"]


def test_a_seed_depends_on_the_run_the_place_the_prompt_and_its_number(proxy) -> None:
    first, other = proxy.post("/groups").json()["sessions"]
    for session in (first, first, other):
        proxy.sdk(session).chat.completions.create(model="test", messages=ASKED)
    requests = proxy.engine.requests
    assert [sent(request) for request in requests] == [
        seed_of(requests[0], "group 0 0"),
        seed_of(requests[1], "group 0 0", 1),
        seed_of(requests[2], "group 0 1"),
    ]
    (session,) = {call["params"]["sampling_seed"] for call in proxy.calls(other)}
    assert session == sent(requests[2])


def test_answers_of_one_request_have_seeds_of_their_own(proxy) -> None:
    proxy.sdk(proxy.session()).chat.completions.create(model="test", messages=ASKED, n=3)
    requests = proxy.engine.requests
    assert {sent(request) for request in requests} == {seed_of(requests[0], "group 0 0", number) for number in range(3)}


def test_a_programs_own_seed_comes_first(proxy) -> None:
    proxy.sdk(proxy.session()).chat.completions.create(model="test", messages=ASKED, seed=7)
    assert sent(proxy.engine.requests[0]) == 7


def test_an_episode_that_is_played_again_has_another_seed(proxy) -> None:
    label = Label(4, 4, Episode("greedy", 3, 1), 12)
    for _ in range(2):
        session = proxy.session(metadata=label.metadata)
        proxy.sdk(session).chat.completions.create(model="test", messages=ASKED)
    requests = proxy.engine.requests
    assert [sent(request) for request in requests] == [
        seed_of(requests[0], f"evaluation 4 greedy 3 1 {attempt}") for attempt in range(2)
    ]


def test_an_interrupted_answer_is_continued_under_its_seed(proxy) -> None:
    proxy.engine.enqueue(Reply([5, 6], finish_reason="abort"))
    proxy.sdk(proxy.session()).chat.completions.create(model="test", messages=ASKED)
    first, second = proxy.engine.requests
    assert second["input_ids"] == [*first["input_ids"], 5, 6]
    assert sent(second) == sent(first)


class TestOtherwise:
    """Without `engine.deterministic`."""

    @pytest.fixture
    def run_config(self, run_config: dict[str, Any]) -> dict[str, Any]:
        return run_config | {"engine": {}}

    def test_calls_have_no_seed_of_the_run(self, proxy) -> None:
        proxy.sdk(proxy.session()).chat.completions.create(model="test", messages=ASKED)
        assert "sampling_seed" not in proxy.engine.requests[0]["sampling_params"]
