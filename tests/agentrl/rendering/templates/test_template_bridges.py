"""Bridges over a chat template: a turn that the template keeps extends the recorded ids; a rewritten turn forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import ForkReason
from agentrl.errors import RequestError
from agentrl.rendering import Renderer
from agentrl.rendering.templates.template_renderer import TemplateRenderer, _behind_last

from ..chat_templates import (
    COUNTING,
    DATED,
    ELIDING,
    FORGETFUL,
    LOUD,
    NUMBERED,
    OPENED,
    PADDED,
    PLAIN,
    QUOTING,
    SEPARATED,
    THOUGHTFUL,
    TRIMMED,
)
from ..conftest import CHATML_TOKENS, byte_tokenizer, call, patient, published_template
from .template_conversations import AND, CALC, HISTORY, YES, load, parse, sample, talk

replies = st.one_of(
    st.text(max_size=6).map(lambda text: {"role": "assistant", "content": text}),
    st.just({"role": "assistant", "content": "", "tool_calls": [call("calc", '{"expression": "1"}')]}),
)
added = st.lists(
    st.one_of(
        st.text(max_size=6).map(lambda text: {"role": "user", "content": text}),
        st.text(max_size=6).map(lambda text: {"role": "tool", "tool_call_id": "call_1", "content": text}),
    ),
    max_size=2,
)


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return load(tmp_path_factory.mktemp("stable"), PLAIN)


@patient
@given(turns=st.lists(st.tuples(replies, added), max_size=3))
def test_a_stable_template_never_forks(stable: Renderer, turns: list[Any]) -> None:
    messages = list(HISTORY)
    ids = stable.render(messages, [CALC])
    for reply, after in turns:
        messages = [*messages, reply]
        closed = stable.decode(stable.render(messages, [CALC]))
        sampled = sample(stable, closed[len(stable.decode(ids)) :].partition("<|im_end|>")[0])
        bridge = stable.bridge(ids + sampled, after, [CALC], messages_before=messages)
        assert bridge.delta_ids is not None
        messages, ids = [*messages, *after], ids + sampled + bridge.delta_ids
        assert ids == stable.render(messages, [CALC])


def test_a_reply_spelled_differently_is_kept_as_sampled(stable: Renderer) -> None:
    prompt = stable.render(HISTORY, [CALC])
    sampled = sample(stable, '<tool_call>\n{"name":"calc", "arguments":{"expression":"1"}}\n</tool_call>')
    (found,) = parse(stable, prompt, sampled).tool_calls
    reply = {"role": "assistant", "content": None, "tool_calls": [call("calc", found.arguments, found.id)]}
    after = [{"role": "tool", "tool_call_id": found.id, "content": "1"}]
    bridge = stable.bridge(prompt + sampled, after, [CALC], messages_before=[*HISTORY, reply])
    assert bridge.delta_ids is not None
    assert stable.decode(bridge.delta_ids) == "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"


def test_dropped_reasoning_forks_with_and_without_it_in_the_request(tmp_path: Path) -> None:
    renderer = load(tmp_path, FORGETFUL)
    prompt = renderer.render(HISTORY, None)
    after = [{"role": "user", "content": "and?"}]
    for reply in (
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
    ):
        thoughtful = prompt + sample(renderer, "<think>hm</think>yes")
        bridge = renderer.bridge(thoughtful, after, None, messages_before=[*HISTORY, reply])
        assert bridge.reason is ForkReason.REASONING_DROPPED
    plain = prompt + sample(renderer, "yes")
    reply = {"role": "assistant", "content": "yes"}
    assert renderer.bridge(plain, after, None, messages_before=[*HISTORY, reply]).delta_ids is not None


def test_a_template_that_rewrites_more_than_reasoning_has_that_reason(tmp_path: Path) -> None:
    renderer = load(tmp_path, "{{ messages | length }}" + FORGETFUL)
    prompt, reply = renderer.render(HISTORY, None), {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    sampled = sample(renderer, "<think>hm</think>yes")
    after = [{"role": "user", "content": "and?"}]
    bridge = renderer.bridge(prompt + sampled, after, None, messages_before=[*HISTORY, reply])
    assert bridge.reason is ForkReason.TEMPLATE_REWROTE


def test_the_qwen3_template_forks_exactly_where_it_drops_reasoning(tmp_path: Path) -> None:
    renderer = load(tmp_path, published_template("qwen3"))
    prompt = renderer.render(HISTORY, [CALC])
    sampled = sample(
        renderer,
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>',
    )
    found = parse(renderer, prompt, sampled)
    assert (found.reasoning, found.content) == ("hm", None)
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call(item.name, item.arguments, item.id) for item in found.tool_calls],
    }
    before = [*HISTORY, reply]
    result = {"role": "tool", "tool_call_id": "x", "content": "1"}
    question = {"role": "user", "content": "and?"}
    assert renderer.bridge(prompt + sampled, [result], [CALC], messages_before=before).delta_ids is not None
    forked = renderer.bridge(prompt + sampled, [result, question], [CALC], messages_before=before)
    assert forked.reason is ForkReason.REASONING_DROPPED


def test_a_turn_that_cannot_be_proved_forks_with_its_reason(tmp_path: Path) -> None:
    counting = load(tmp_path, COUNTING)
    reply, after = {"role": "assistant", "content": "yes"}, [{"role": "user", "content": "and?"}]
    prompt = counting.render(HISTORY, None)
    sampled = sample(counting, "yes")

    def reason(previous: list[int], before: list[Any] | None) -> ForkReason | None:
        return counting.bridge(previous, after, None, messages_before=before).reason

    assert reason(prompt + sampled, [*HISTORY, reply]) is ForkReason.TEMPLATE_REWROTE
    assert reason(prompt + sampled, None) is ForkReason.TEMPLATE_REWROTE
    assert reason(prompt + sampled[:-1], [*HISTORY, reply]) is ForkReason.TRUNCATED
    assert reason(prompt + sampled, HISTORY) is ForkReason.HISTORY_EDITED


def test_a_reply_that_spells_the_end_of_its_turn_forks_or_extends_exactly(stable: Renderer) -> None:
    reply = {"role": "assistant", "content": "a<|im_end|>b"}
    prompt = stable.render(HISTORY, None)
    tokenizer = byte_tokenizer(*CHATML_TOKENS)
    tokenizer.encode_special_tokens = True
    spelled = tokenizer.encode("a<|im_end|>b", add_special_tokens=False).ids + stable.stop_token_ids
    bridge = stable.bridge(
        prompt + spelled, [{"role": "user", "content": "x"}], None, messages_before=[*HISTORY, reply]
    )
    assert bridge.reason is ForkReason.TEMPLATE_REWROTE


CALLING = '<tool_call>{"name": "calc",  "arguments": {"expression": "é"}}</tool_call>'
outputs = st.sampled_from(
    ["yes", " yes\n", "a < b", CALLING, f"so\n{CALLING}\n{CALLING}", "<tool_call>{</tool_call>", ""]
)
talks = st.lists(st.tuples(outputs, st.sampled_from(["and?", " \n", "é"])), min_size=1, max_size=4)


KEEPING = {
    "plain": PLAIN,
    "separated": SEPARATED,
    "trimmed": TRIMMED,
    "loud": LOUD,
    "thoughtful": THOUGHTFUL,
    "quoting": QUOTING,
}


@pytest.fixture(scope="module", params=[*KEEPING.values()], ids=[*KEEPING])
def habitual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return load(tmp_path_factory.mktemp("models"), request.param)


@patient
@given(turns=talks)
def test_templates_that_keep_what_they_wrote_never_fork(
    habitual: TemplateRenderer, turns: list[tuple[str, str]]
) -> None:
    """However the model spelled its reply: the sampled ids stay, and what follows them is the template's."""
    assert talk(habitual, turns) == [None] * len(turns)


@pytest.mark.parametrize("template", [COUNTING, DATED, NUMBERED], ids=["counting", "dated", "numbered"])
def test_templates_that_rewrite_always_fork(tmp_path: Path, template: str) -> None:
    renderer = load(tmp_path, template)
    assert talk(renderer, [("yes", "and?"), (CALLING, "3"), ("no", "so?")]) == [ForkReason.TEMPLATE_REWROTE] * 3


def test_a_prompt_with_another_date_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a replica that has not rendered the conversation before."""
    reply, after = {"role": "assistant", "content": "yes"}, [{"role": "user", "content": "and?"}]
    renderers = []
    for i, today in enumerate(("Monday", "Tuesday")):
        monkeypatch.setattr(
            "agentrl.rendering.templates.chat_template._strftime_now", lambda format, today=today: today
        )
        renderers.append(load(tmp_path / str(i), DATED))
    monday, tuesday = renderers
    previous = monday.render(HISTORY, None) + sample(monday, "yes")
    assert monday.bridge(previous, after, None, messages_before=[*HISTORY, reply]).delta_ids is not None
    assert tuesday.bridge(previous, after, None, messages_before=[*HISTORY, reply]).reason is (
        ForkReason.TEMPLATE_REWROTE
    )


@patient
@given(turns=talks)
def test_a_replica_that_remembers_nothing_bridges_alike(
    stable: Renderer, tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]]
) -> None:
    messages, ids = list(HISTORY), stable.render(HISTORY, [CALC])
    for text, question in turns:
        ids = ids + sample(stable, text)
        before = [*messages, {"role": "assistant", "content": text}]
        after = [{"role": "user", "content": question}]
        fresh = load(tmp_path_factory.mktemp("models"), PLAIN)
        bridges = [renderer.bridge(ids, after, [CALC], messages_before=before) for renderer in (stable, fresh)]
        assert bridges[0] == bridges[1]
        messages = [*before, *after]
        ids = ids + (bridges[0].delta_ids or [])


@pytest.mark.parametrize(
    ("part", "ids", "expected"),
    [
        ([1, 2], [1, 2, 3], [3]),
        ([1, 2], [0, 1, 2, 3, 1, 2, 4, 5], [4, 5]),  # the last of two
        ([1, 2], [0, 1, 2, 1, 3], [1, 3]),  # a beginning is no occurrence
        ([1, 2], [0, 1, 2], []),
        ([1, 2], [2, 1], []),
        ([1], [], []),
        ([], [1], []),
    ],
)
def test_ids_after_the_last_occurrence_are_returned(part: list[int], ids: list[int], expected: list[int]) -> None:
    assert _behind_last(part, ids) == expected


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("<think> a </think>b", "a"),
        ("a</think>b", "a"),  # the prompt opened it
        ("<think>a</think>b</think>c", "a"),
        ("<think>a<think>b</think>c", "b"),
        ("<think>never closed", ""),
        ("plain", ""),
    ],
)
def test_the_reasoning_of_an_output_is_found(stable: TemplateRenderer, sampled: str, expected: str) -> None:
    assert stable._reasoning(sampled) == expected


def test_a_turn_end_with_other_ids_forks(stable: TemplateRenderer) -> None:
    (end,) = stable.stop_token_ids
    assert stable._extension("<|im_end|>", "\nx", [end]).delta_ids == stable.encode("\nx")
    assert stable._extension("<|im_end|>", "\nx", [end + 1]).reason is ForkReason.TEMPLATE_REWROTE


def test_reasoning_that_the_prompt_opened_was_dropped(tmp_path: Path) -> None:
    renderer = load(tmp_path, OPENED)
    previous = renderer.render(HISTORY, [CALC]) + sample(renderer, "hm</think>yes")
    bridge = renderer.bridge(previous, AND, [CALC], messages_before=[*HISTORY, YES])
    assert bridge.reason is ForkReason.REASONING_DROPPED


ODD = '<tool_call>{"name":"calc",  "arguments": {"expression": "1"}}</tool_call>'


@pytest.mark.parametrize(
    ("sampled", "reply"),
    [
        (" yes\n", YES),
        ("<think> </think>yes", YES),
        (" ", {"role": "assistant", "content": ""}),
        (ODD, {"role": "assistant", "content": "", "tool_calls": [call("calc", '{"expression": "1"}')]}),
        ("\n" + ODD, {"role": "assistant", "content": "", "tool_calls": [call("calc", '{"expression": "1"}')]}),
    ],
)
def test_a_turn_with_the_same_message_is_the_sampled_one(tmp_path: Path, sampled: str, reply: dict[str, Any]) -> None:
    """Also where the template writes the last turn in another way."""
    renderer = load(tmp_path, PADDED + "{# </think> #}")
    previous = renderer.render(HISTORY, [CALC]) + sample(renderer, sampled)
    assert renderer.bridge(previous, AND, [CALC], messages_before=[*HISTORY, reply]).delta_ids is not None


@pytest.mark.parametrize(("name", "arguments"), [("calc", '{"expression": "2"}'), ("other", '{"expression": "1"}')])
def test_a_turn_with_another_call_is_not_the_sampled_one(tmp_path: Path, name: str, arguments: str) -> None:
    renderer = load(tmp_path, PADDED)
    previous = renderer.render(HISTORY, [CALC]) + sample(renderer, ODD)
    reply = {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]}
    bridge = renderer.bridge(previous, AND, [CALC], messages_before=[*HISTORY, reply])
    assert bridge.reason is ForkReason.TEMPLATE_REWROTE


def test_a_reply_that_spells_the_first_turn_of_a_rewritten_prompt_forks(tmp_path: Path) -> None:
    turns = [("yes", "and?"), ("<|im_start|>system\nBe brief.", "so?")]
    assert talk(load(tmp_path, ELIDING), turns) == [None, ForkReason.TEMPLATE_REWROTE]


def test_texts_are_remembered_with_their_tools(tmp_path: Path) -> None:
    renderer, fresh = load(tmp_path / "a", THOUGHTFUL), load(tmp_path / "b", THOUGHTFUL)
    renderer.render(HISTORY, None)
    longer = [*HISTORY, YES, *AND]
    for history, tools in [(HISTORY, [CALC]), (longer, None)]:
        previous = fresh.render(history, tools) + sample(fresh, "yes")
        bridge = renderer.bridge(previous, AND, tools, messages_before=[*history, YES])
        assert bridge.delta_ids is not None
        assert renderer.decode(bridge.delta_ids) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_reasoning_that_clients_drop_is_not_part_of_their_messages(tmp_path: Path) -> None:
    assert talk(load(tmp_path, THOUGHTFUL), [("<think>hm</think>yes", "and?"), ("no", "so?")]) == [None, None]


def test_a_replica_that_has_not_rendered_the_tools_bridges(tmp_path: Path) -> None:
    renderer, fresh = load(tmp_path / "a", THOUGHTFUL), load(tmp_path / "b", THOUGHTFUL)
    previous = renderer.render(HISTORY, [CALC]) + sample(renderer, "yes")
    assert fresh.bridge(previous, AND, [CALC], messages_before=[*HISTORY, YES]).delta_ids is not None


def test_a_template_that_refuses_reasoning_forks_and_one_that_refuses_messages_is_a_400(
    tmp_path: Path,
) -> None:
    refusing = "{% if message.reasoning_content or message.role == 'tool' %}{{ raise_exception('no room') }}{% endif %}"
    renderer = load(tmp_path, PLAIN.replace("<|im_start|>{{", refusing + "<|im_start|>{{") + "{# </think> #}")
    prompt, before = renderer.render(HISTORY, None), [*HISTORY, YES]
    thought = prompt + sample(renderer, "<think>hm</think>yes")
    assert renderer.bridge(thought, AND, None, messages_before=before).reason is ForkReason.TEMPLATE_REWROTE
    result = {"role": "tool", "tool_call_id": "x", "content": "1"}
    with pytest.raises(RequestError, match="no room"):
        renderer.bridge(prompt + sample(renderer, "yes"), [result], None, messages_before=before)
