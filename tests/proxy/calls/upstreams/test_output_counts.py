"""The output tokens of an upstream's answer: the largest report within bounds, else one for each event."""

import pytest

from agentrl.proxy.calls.upstreams.output_counts import OutputCount
from agentrl.proxy.dialects import DIALECTS

CHAT, MESSAGES, RESPONSES = (DIALECTS[f"/v1/{name}"] for name in ("chat/completions", "messages", "responses"))


@pytest.mark.parametrize(
    ("dialect", "answer", "tokens"),
    [
        (CHAT, [{"usage": {"completion_tokens": 7}}], 7),
        (MESSAGES, [{"usage": {"output_tokens": 7, "input_tokens": 90}}], 7),
        (
            MESSAGES,
            [{"type": "message_start", "message": {"usage": {"output_tokens": 1}}}, {"usage": {"output_tokens": 9}}],
            9,
        ),
        (RESPONSES, [{"response": {"status": "completed", "usage": {"output_tokens": 3}}}], 3),
        (CHAT, [{"choices": []}] * 5, 5),
        (CHAT, [{"usage": None}, "text"], 2),
        (CHAT, [{"usage": {"completion_tokens": 10**30}}], 1),
        (CHAT, [{"usage": {"completion_tokens": "7"}}], 1),
        (CHAT, [{"usage": {"completion_tokens": -7}}], 1),
        (CHAT, [{"usage": {"completion_tokens": True}}], 1),
    ],
)
def test_the_output_tokens_of_an_answer_are_counted_in_every_dialect(dialect, answer, tokens):
    count = OutputCount()
    for data in answer:
        count.add(dialect.read_upstream(data))
    assert count.tokens == tokens
