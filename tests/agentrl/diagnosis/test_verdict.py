"""Figures and verdicts of sessions that are written down here call by call."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.console import Console
from agentrl.diagnosis import call_notes, report
from agentrl.diagnosis.record import read
from agentrl.diagnosis.report import Report, as_json
from agentrl.diagnosis.tree_rows import rows
from agentrl.doctor.show import show
from agentrl.domain.schemas import UNREAD
from agentrl.visible import visible


def call(id: str, parent: str | None = None, **facts: Any) -> dict[str, Any]:
    """A delivered call with two sampled tokens."""
    return {
        "id": id,
        "parent_id": parent,
        "status": "complete",
        "role": "main",
        "dialect": "openai.chat",
        "fork_reason": None,
        "finish_reason": "stop",
        "error": None,
        "params": {"temperature": 1.0},
        "options": None,
        "digest": id,
        "distribution_modified": False,
        "system": [],
        "tools": None,
        "prompt_tokens": 4,
        "output_tokens": 2,
        "new_messages": [{"role": "user", "content": f"to {id}"}],
        "answer": {"role": "assistant", "content": id},
        "prompt_delta_ids": [ord(c) for c in f"to {id}"],
        "output_ids": [1, 2],
        "logprobs": [-0.5, -0.5],
        "version_spans": [[0, 0, 2]],
        **facts,
    }


def undelivered(id: str, status: str, error: str) -> dict[str, Any]:
    left_out = ("new_messages", "answer", "prompt_delta_ids", "output_ids", "logprobs", "version_spans")
    bare = {name: value for name, value in call(id).items() if name not in left_out}
    return bare | {"status": status, "error": error, "output_tokens": 0, "finish_reason": None}


def of(*calls: dict[str, Any], subagents: Sequence[Report] = (), **facts: Any) -> Report:
    summary = {
        "session_id": "s",
        "parent_session_id": None,
        "metadata": {},
        "status": "completed",
        "is_eval": False,
        "error": None,
        "rewards": [{"interaction_id": None, "name": "reward", "value": 1.0}],
        **facts,
    }
    return report.make(read(summary, calls, subagents=[one.session for one in subagents]), None)


def subagent(id: str, *calls: dict[str, Any], **facts: Any) -> Report:
    return of(*calls, session_id=id, parent_session_id="s", rewards=[], **facts)


def showing(images: int, id: str = "a", parent: str | None = None) -> dict[str, Any]:
    """A call behind a tool's result that held images."""
    result = {"role": "tool", "tool_call_id": "c", "content": "see " + UNREAD * images}
    return call(id, parent, new_messages=[result])


GREEDY = {"params": {"temperature": 0.0}}
EDITED = {"fork_reason": "history_edited"}


@pytest.mark.parametrize(
    ("found", "answer", "problem"),
    [
        (of(call("a"), call("b", "a")), "trainable", None),
        (of(), "not trainable", "no call reached the proxy"),
        (of(subagents=[subagent("c", call("a"))]), "trainable", None),
        (of(subagents=[subagent("c")]), "not trainable", "sub-agent c: no call reached the proxy"),
        (of(call("a"), subagents=[subagent("c", call("a"))]), "trainable", None),
        (
            of(call("a"), subagents=[subagent("c", call("a", **GREEDY), metadata={"name": "planner"})]),
            "trainable, with problems",
            "sub-agent planner: no sampled token can be trained: 1 greedy",
        ),
        (
            of(call("a"), subagents=[subagent("c", call("a"), status="abandoned", error="its parent session ended")]),
            "trainable",
            None,
        ),
        (of(call("a", **GREEDY), subagents=[subagent("c", call("a"))]), "trainable, with problems", "1 greedy"),
        (of(call("a", **GREEDY)), "not trainable", "1 greedy (send no temperature 0)"),
        (of(call("a", **GREEDY), call("b", "a")), "trainable", None),
        (of(call("a", role="upstream")), "not trainable", "1 for another model"),
        (of(undelivered("a", "lost", "the proxy stopped")), "not trainable", "1 lost (the proxy stopped)"),
        (of(call("a"), undelivered("b", "lost", "x")), "trainable, with problems", "1 answer lost"),
        (of(call("a", output_tokens=0, output_ids=[], logprobs=[], version_spans=[])), "not trainable", "is empty"),
        (of(call("a", logprobs=[-0.5])), "trainable, with problems", "logprobs cover only 50.0%"),
        (of(call("a", version_spans=[[0, 0, 1]])), "trainable, with problems", "versions cover only 50.0%"),
        (of(call("a", output_ids=[1])), "trainable, with problems", "ids cover only 0.0%"),
        (of(call("a"), status="failed", error="boom"), "trainable, with problems", "the session failed: boom"),
        (of(call("a"), call("b", **EDITED), call("c", **EDITED)), "trainable, with problems", "only 0 of 2 calls"),
        (of(call("a"), call("b", "a"), call("c", "b"), call("d", **EDITED)), "trainable", None),
    ],
)
def test_a_verdict_follows_from_the_calls(found, answer, problem):
    assert found.verdict.answer == answer
    if problem is None:
        assert found.verdict.problems == []
    else:
        assert problem in found.verdict.problems[0]


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (
            of(call("a"), call("b", "a"), call("c", "b"), call("d", **EDITED)),
            "1 call could not extend an earlier one: call 4 (history edited)",
        ),
        (of(call("a"), status="abandoned"), "the session was abandoned"),
        (of(call("a"), rewards=[]), "no reward was given"),
        (of(call("a"), is_eval=True), "not trained itself"),
        (of(call("a"), call("b", "a", distribution_modified=True)), "2 sampled tokens cannot be trained"),
        (of(showing(1), showing(1, "b", "a")), f'1 attachment in tools\' results was replaced by the text "{UNREAD}"'),
        (of(showing(2)), "2 attachments in tools' results were replaced"),
        (
            of(call("a", options={"left_out": ["web_search"]})),
            "were left out of the prompt: web_search",
        ),
        (of(call("a"), undelivered("b", "failed", "refused")), "1 call failed (refused)"),
        (of(call("a"), undelivered("b", "aborted", "")), "1 call aborted"),
        (of(call("a"), undelivered("b", "running", "")), "1 call still running"),
        (of(subagents=[subagent("c", call("a"))]), "the session itself made no call: its sub-agents did"),
    ],
)
def test_a_note_names_what_to_improve(found, note):
    assert note in found.verdict.notes[0]


def test_a_rewarded_side_call_can_be_trained():
    side = call("a", role="side")
    assert of(side).figures.trainable_tokens == 0
    assert of(side, rewards=[{"interaction_id": "a", "name": "r", "value": 1.0}]).figures.trainable_tokens == 2


def test_figures_of_a_branching_session():
    found = of(
        call("a"),
        call("b", "a", options={"retry": 1}),
        call("c", "a", digest="b"),
        call("d", **EDITED),
        call("e", role="subagent", fork_reason="other_agent"),
        undelivered("f", "failed", "x"),
    ).figures
    assert (found.calls, found.delivered, found.failed, found.trajectories) == (6, 5, 1, 4)
    assert (found.continuing, found.extending, found.merge_rate) == (3, 2, 2 / 3)
    assert (found.retries, found.repeated, found.subagent, found.forks) == (1, 1, 1, 3)


def test_the_drawing_keeps_chains_straight_and_moves_branches():
    calls = [call("a"), call("b", "a"), call("c", "b"), call("d", "a"), call("e", "d"), call("f", "d"), call("g")]
    drawn = [f"{lead}{node.id}" for node, lead in rows(of(*calls, undelivered("h", "lost", "")).session)]
    assert drawn == ["● a", "│ └ d", "│ │ └ f", "│ │ e", "│ b", "│ c", "● g", "○ h"]


def test_a_chain_of_a_thousand_turns_is_drawn_without_recursion():
    calls = [call("0"), *(call(str(i), str(i - 1)) for i in range(1, 1001))]
    found = of(*calls, call("other", "999"))
    assert len(list(rows(found.session))) == 1002
    assert found.forks[0].tokens.position == sum(len(f"to {i}") + 2 for i in range(1000)) + 3


def test_the_screen_is_bounded_whatever_a_session_holds():
    found = of(call("a"), *(call(f"{kind}{i}", **EDITED) for kind in "bc" for i in range(200)))
    out = io.StringIO()
    show(found, Console(file=out, width=200))
    text = out.getvalue()
    assert "… 301 more calls; --json has them all" in text
    told = "397 more of this kind (history edited): call 2, call 3, call 4, call 5, call 6, … (400 in all); --json has"
    assert told in text
    assert len(text.splitlines()) < 150
    assert len(as_json(found)["forks"]) == 400


def test_a_system_prompt_that_was_never_processed_costs_nothing():
    before, now = [1, 50, 51, 2, 9, 9, 9], [1, 60, 61, 62, 2, 9, 9, 9]
    found = of(call("a", prompt_delta_ids=before), call("b", prompt_delta_ids=now, **EDITED))
    assert found.forks[0].cost_tokens == 5


def test_a_fork_that_was_processed_before_nowhere_and_further_subagents_are_shown_as_such():
    below = [subagent(str(i), call("a")) for i in range(7)]
    found = of(call("a"), call("b", fork_reason="other_agent"), subagents=below)
    out = io.StringIO()
    show(found, Console(file=out, width=200))
    text = out.getvalue()
    assert "none: nothing of it was processed before" in text
    assert "… 2 more sub-agents; --json has them all" in text
    assert [line for line in text.splitlines() if line.startswith("sub-agent ")][-1].startswith("sub-agent 4 ")


def test_a_command_that_failed_is_shown_with_its_status():
    found = of(call("a"))
    failed = report.make(found.session, None, command_status=3)
    out = io.StringIO()
    show(failed, Console(file=out, width=200))
    assert "the command ended with exit status 3" in out.getvalue()
    assert failed.verdict.problems == ["the command ended with exit status 3"]


def test_refusals_above_the_stored_number_are_summarized():
    one = {"status": 404, "code": "model_not_found", "message": "no model 'x'"}
    todo = "name it 'default'"
    assert call_notes.refused([one] * 20) == [f"20 calls or more were refused (404): no model 'x': {todo}"]
    kinds = [one | {"message": str(i)} for i in range(7)]
    assert call_notes.refused(kinds)[-1] == "2 more kinds of refusals; --json has them all"


def test_control_characters_are_visible():
    assert visible("a\n\tb\x1b[0m\u200bé") == "a\\n\\tb\\x1b[0m\\u200bé"


def test_without_a_tokenizer_ids_stand_for_text():
    (fork,) = as_json(of(call("a"), call("b", **EDITED)))["forks"]
    token = fork["first_different_token"]
    assert (token["position"], token["other_id"], token["id"]) == (3, ord("a"), ord("b"))
    assert token["text"]["ours"] == (" ".join(str(ord(c)) for c in "to "), str(ord("b")), "")


def test_calls_that_asked_for_other_sampling_are_counted_by_value() -> None:
    def asking(id: str, asked: dict[str, Any], parent: str | None = None) -> dict[str, Any]:
        return call(id, parent, options={"replaced": asked}, params={"temperature": 1.0, "max_new_tokens": 8})

    found = of(
        asking("a", {"temperature": 0.0}),
        asking("b", {"temperature": 0.0}, "a"),
        asking("c", {"temperature": 0.1, "max_new_tokens": 9}, "b"),
        call("d", "c"),
    )
    assert found.verdict.answer == "trainable"
    assert found.verdict.notes == [
        "3 calls asked for temperature 0 (2), 0.1 (1) and got the run's: 1",
        "1 call asked for max_tokens 9 and got the run's, or what the context had room for: 8",
    ]
    assert found.figures.replaced == 3
    assert as_json(found)["calls"][0]["replaced"] == {"temperature": 0.0}
