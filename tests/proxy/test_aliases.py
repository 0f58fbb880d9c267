"""Programs that name a model of their provider, and ask for more tokens than the policy's context holds."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

HELLO: list[Any] = [{"role": "user", "content": "abcd"}]


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    run_config["proxy"] = {"model_aliases": ["claude-*", "gpt-[0-9]*"], "clip_max_tokens": True}
    return run_config


def test_an_alias_reaches_the_policy_in_every_dialect(proxy: Any) -> None:
    session = proxy.session()
    proxy.engine.enqueue(*(proxy.says("dcba") for _ in range(3)))
    client = anthropic.Anthropic(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)
    said = client.messages.create(model="claude-opus-5-5", max_tokens=9, messages=HELLO)
    assert (said.model, said.content[0].text) == ("claude-opus-5-5", "dcba")
    assert client.messages.count_tokens(model="claude-opus-5-5", messages=HELLO).input_tokens > 0
    assert client.models.retrieve("claude-opus-5-5").max_input_tokens == proxy.renderer.max_context
    sdk = proxy.sdk(session)
    assert sdk.chat.completions.create(model="gpt-5", messages=HELLO).model == "gpt-5"
    assert sdk.responses.create(model="gpt-5", input="abcd").output_text == "dcba"
    with pytest.raises(openai.NotFoundError, match=r"names in proxy"):
        sdk.chat.completions.create(model="gpt-oss", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_of_a_message_is_clipped_to_the_context_and_the_stop_reason_says_so(
    proxy: Any, stream: bool
) -> None:
    """Claude Code asks for 32,000 tokens whatever the policy's context."""
    session = proxy.session()
    room = proxy.renderer.max_context - len(proxy.renderer.render(HELLO, None))
    proxy.engine.enqueue(proxy.says("a" * (room + 1)), proxy.says("dcba"))
    client = anthropic.Anthropic(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)
    asked: dict[str, Any] = {"model": "default", "max_tokens": 20_000, "messages": HELLO}
    if stream:
        with client.messages.stream(**asked) as events:
            reasons = [events.get_final_message().stop_reason]
    else:
        reasons = [client.messages.create(**asked).stop_reason]
    assert proxy.engine.requests[0]["sampling_params"]["max_new_tokens"] == room
    reasons.append(client.messages.create(**asked).stop_reason)
    assert reasons == ["model_context_window_exceeded", "end_turn"]


def test_clip_max_tokens_applies_to_chat_completions(proxy: Any) -> None:
    proxy.engine.enqueue(proxy.says("dcba"))
    reply = proxy.sdk(proxy.session()).chat.completions.create(model="default", messages=HELLO, max_tokens=100_000)
    assert reply.choices[0].finish_reason == "stop"
