"""Every hand-written family, over a synthetic tokenizer with its special tokens: bridges and forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import ForkReason
from agentrl.errors import ModelFolderError, RequestError
from agentrl.rendering import load_renderer
from agentrl.rendering.templates.family_renderer import FamilyRenderer

from .conftest import byte_tokenizer, write_folder
from .contract.drawn_replies import HISTORY, quick, replies, words
from .family_models import FAMILIES, NO_TEXT_BESIDE_CALLS, ONE_CALL, TOOLS, load_model, reply, sample, special_tokens
from .outputs import delivered, follow_up, parse

ANY_TURN = {"deepseek-r1"}
"""Drops the reasoning of a turn whatever follows it; the others that drop it do so when a user speaks."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyRenderer:
    return load_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def specials(renderer: FamilyRenderer) -> list[str]:
    return [token.content for token in renderer._tokenizer.get_added_tokens_decoder().values()]


def as_message(renderer: FamilyRenderer, drawn: tuple[str, str, list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    content, reasoning, found = drawn
    if renderer.name in ONE_CALL:
        found = found[:1]
    if found and renderer.name in NO_TEXT_BESIDE_CALLS:
        content = ""
    if not content and not found:
        content = "Done."
    return reply(content, reasoning, *((f"functions.{name}:{i}", name, args) for i, (name, args) in enumerate(found)))


@quick
@given(turns=st.lists(st.tuples(replies, st.booleans()), min_size=1, max_size=4))
def test_append_only_conversations_fork_only_where_reasoning_is_dropped(
    model: FamilyRenderer, turns: list[tuple[Any, bool]]
) -> None:
    messages, ids = list(HISTORY), model.render(HISTORY, TOOLS)
    drops = model._inner.effective_thinking_retention != "all"
    for i, (drawn, with_reasoning) in enumerate(turns):
        output = sample(model, as_message(model, drawn))
        parsed, _ = parse(model, TOOLS, ids, output)
        ids = ids + output
        messages = [*messages, delivered(parsed, with_reasoning=with_reasoning)]
        after = follow_up(parsed, f"more {i}")
        bridge = model.bridge(ids, after, TOOLS, messages_before=messages)
        messages = [*messages, *after]
        rendered = model.render(messages, TOOLS)
        if bridge.delta_ids is None:
            assert bridge.reason is ForkReason.REASONING_DROPPED
            assert drops
            assert after[0]["role"] == "user" or model.name in ANY_TURN
            ids = rendered
        else:
            assert model.decode(rendered).endswith(model.decode(bridge.delta_ids))
            ids = ids + bridge.delta_ids


@quick
@given(data=st.data())
def test_a_turn_of_anything_bridges_unless_its_reasoning_was_never_closed(
    model: FamilyRenderer, data: st.DataObject
) -> None:
    prompt = model.render(HISTORY, TOOLS)
    marked = [token for token in specials(model) if model._encode(token)[0] not in model.stop_token_ids]
    text = "".join(data.draw(st.lists(st.one_of(words, st.sampled_from(marked)), max_size=6)))
    output = [*model._encode(text), data.draw(st.sampled_from(model.stop_token_ids))]
    parsed, _ = parse(model, TOOLS, prompt, output)
    message = delivered(parsed, with_reasoning=True)
    bridge = model.bridge(prompt + output, follow_up(parsed, "more"), TOOLS, messages_before=[*HISTORY, message])
    if bridge.delta_ids is not None:
        assert "more" in model.decode(bridge.delta_ids)
    else:
        assert bridge.reason in (ForkReason.REASONING_DROPPED, ForkReason.TEMPLATE_REWROTE)
        assert model.reasons or "<think>" in text


def test_several_calls_are_refused_by_a_format_with_one(tmp_path: Path) -> None:
    llama = load_model(tmp_path / "llama-3", "llama-3")
    two = reply("", "", ("a", "calc", {"expression": "1"}), ("b", "calc", {"expression": "2"}))
    with pytest.raises(RequestError, match="single tool call") as refused:
        llama.render([*HISTORY, two], TOOLS)
    assert (refused.value.status, refused.value.code) == (400, "invalid_messages")


def test_gpt_oss_without_its_encoding_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: Any) -> None:
        raise RuntimeError("failed to download or load vocab file")

    tokenizer = byte_tokenizer("<|start|>")
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", fails)
    with pytest.raises(ModelFolderError, match="cannot be loaded: failed to download"):
        load_renderer(write_folder(tmp_path, tokenizer, None), "gpt-oss")


def test_every_family_has_special_tokens_of_its_own() -> None:
    assert all(len(special_tokens(name)) > 3 for name in FAMILIES if name != "gpt-oss")
    assert len(FAMILIES) == 28
