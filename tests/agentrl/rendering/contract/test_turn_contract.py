"""Turns and openings, for every renderer: the next prompt extends the recorded ids, or a fork has its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.domain.schemas import ForkReason
from agentrl.errors import RequestError

from ..family_models import TOOLS, reply
from ..outputs import delivered, follow_up, parse
from .contracted import Contracted
from .drawn_replies import HISTORY, calc


def fork_reason(contracted: Contracted, after: list[dict[str, Any]]) -> ForkReason | None:
    """Why a complete turn may fork before these messages; None: it must not."""
    if contracted.forks is None and contracted.renderer.reasons and after[0]["role"] == "user":
        return ForkReason.REASONING_DROPPED
    return contracted.forks


@pytest.mark.parametrize("calls", [False, True], ids=["text", "call"])
def test_an_appended_turn_extends_the_recorded_ids(contracted: Contracted, calls: bool) -> None:
    """The delta is what the format writes behind the reply. Only dropped reasoning forks."""
    renderer, written = contracted.renderer, contracted.sample(calc(contracted, "1") if calls else reply("Done."))
    messages, ids = list(HISTORY), renderer.render(HISTORY, TOOLS)
    for turn in ("first", "second"):
        parsed, _ = parse(renderer, TOOLS, ids, written)
        before = [*messages, delivered(parsed, with_reasoning=True)]
        after = follow_up(parsed, turn)
        bridge = renderer.bridge(ids + written, after, TOOLS, messages_before=before)
        assert bridge == renderer.bridge(ids + written, after, TOOLS, messages_before=before)
        messages = [*before, *after]
        rendered = renderer.render(messages, TOOLS)
        if bridge.delta_ids is None:
            assert bridge.reason is fork_reason(contracted, after)
            ids = rendered
        else:
            added = renderer.decode(bridge.delta_ids)
            assert turn in added
            stop = renderer.decode(written[-1:]) if contracted.keeps_stop else ""
            assert renderer.decode(rendered).endswith(stop + added)
            ids = ids + written + bridge.delta_ids


def test_a_call_that_adds_no_message_is_the_generation_prompt_or_a_fork(contracted: Contracted) -> None:
    """The policy speaks again behind its own reply, as the format writes it."""
    renderer, written = contracted.renderer, contracted.sample(reply("Done."))
    ids = renderer.render(HISTORY, TOOLS)
    parsed, _ = parse(renderer, TOOLS, ids, written)
    before = [*HISTORY, delivered(parsed, with_reasoning=True)]
    try:
        rendered = renderer.decode(renderer.render(before, TOOLS))
    except RequestError:
        pytest.skip("two replies cannot follow each other in this format")
    bridge = renderer.bridge(ids + written, [], TOOLS, messages_before=before)
    if bridge.delta_ids is None:
        assert bridge.reason is not None
    else:
        stop = renderer.decode(written[-1:]) if contracted.keeps_stop else ""
        assert rendered.endswith(stop + renderer.decode(bridge.delta_ids))


def test_a_reply_without_its_stop_token_is_truncated(contracted: Contracted) -> None:
    renderer = contracted.renderer
    ids = [*renderer.render(HISTORY, TOOLS), *contracted.sample(reply("Let me see."))[:-1]]
    bridge = renderer.bridge(ids, [{"role": "user", "content": "more"}], TOOLS, messages_before=HISTORY)
    assert (bridge.delta_ids, bridge.reason) == (None, ForkReason.TRUNCATED)


@pytest.mark.parametrize("name", [None, "calc", "look_up"])
def test_a_call_goes_on_behind_its_opening(contracted: Contracted, name: str | None) -> None:
    """A turn that began with an opening is bridged like any other."""
    renderer = contracted.renderer
    call = ("look_up", {"word": "x", "n": 1}) if name == "look_up" else ("calc", {"expression": "1"})
    id = contracted.call_ids.format(name=call[0], index=0)
    message = reply("", "", (id, *call))
    prompt, written = renderer.render(HISTORY, TOOLS), contracted.sample(message)
    opening = renderer.opening(TOOLS, name)
    assert written[: len(opening.ids)] == opening.ids
    parser = renderer.parser(TOOLS, prompt)
    assert parser.push(opening.ids) == []
    parser.push(written[len(opening.ids) :])
    (found,) = parser.finish().tool_calls
    assert (found.name, json.loads(found.arguments)) == call
    after = [{"role": "tool", "tool_call_id": id, "content": "r"}]
    bridge = renderer.bridge(prompt + written, after, TOOLS, messages_before=[*HISTORY, message])
    assert bridge.reason in (None, fork_reason(contracted, after))


def test_a_tool_that_cannot_be_opened_is_refused_by_name(contracted: Contracted) -> None:
    with pytest.raises(RequestError, match=r"no tool is called 'cal'; did you mean 'calc'\?") as refused:
        contracted.renderer.opening(TOOLS, "cal")
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")
    with pytest.raises(RequestError, match="needs tools"):
        contracted.renderer.opening([], None)
