"""Hostile answers of an engine, in every dialect.

Whatever comes: no hang, a response in the dialect's grammar, every intent closed, every delivered answer in the store
with its ids, and nothing that the audit complains about.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.testing import Reply

from .tried_calls import EXAMPLES, FUNCTION, HELLO, SCHEMA, TOOL, fuzzed

PIECES = ["calc(ab)", "calc(", "calc(ab", ")", "abcd", ".", "<tool_call>", "</tool_call>", '{"x": "a', "<think>", "\n"]


@st.composite
def replies(draw, proxy):
    """What an engine may say: any ids, special ones and markup included, in any pieces, broken off anywhere."""
    vocabulary = proxy.renderer.vocab_size
    pieces = st.one_of(
        st.lists(st.integers(0, vocabulary - 1), max_size=6),
        st.lists(st.integers(0, 8), max_size=3),
        st.sampled_from(PIECES).map(lambda piece: proxy.says(piece, end=False)),
    )
    ids = [token for piece in draw(st.lists(pieces, max_size=5)) for token in piece]
    ids += draw(st.sampled_from([[], proxy.renderer.stop_token_ids[:1]]))
    faults: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.builds(dict, status=st.sampled_from([400, 422, 500, 503]), error=st.sampled_from(["no", "", "\0é"])),
        st.builds(dict, error=st.sampled_from(["too long", ""])),
        st.builds(dict, omit=st.sampled_from([frozenset({name}) for name in OMITTED])),
    )
    fault = draw(st.none() | faults) if draw(st.booleans()) else None
    return Reply(
        ids,
        chunks=draw(st.none() | st.lists(st.integers(1, 4), max_size=8)),
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        **(fault or {}),
    ), fault is not None


OMITTED = ("output_ids", "output_token_logprobs", "weight_versions", "finish_reason")
ASKED = {
    "/chat/completions": {"messages": [HELLO], "tools": [TOOL], "max_tokens": 50},
    "/completions": {"prompt": "abcd", "max_tokens": 50},
    "/responses": {"input": "abcd", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 50},
    "/messages": {
        "model": "test",
        "messages": [HELLO],
        "tools": [{"name": "calc", "input_schema": SCHEMA}],
        "max_tokens": 50,
    },
}
STOP = {"/chat/completions": "stop", "/completions": "stop", "/messages": "stop_sequences"}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.searches
def test_an_odd_engine_answer_is_delivered_or_fails_in_the_dialects_shape(fuzz, path):
    proxy = fuzz.proxy

    @fuzzed(max_examples=EXAMPLES)
    @given(data=st.data())
    def examine(data):
        reply, faulty = data.draw(replies(proxy))
        body = ASKED[path] | {"stream": data.draw(st.booleans())}
        if path in STOP and data.draw(st.booleans()):
            body[STOP[path]] = ["b", "calc"]
        fuzz.renew()
        proxy.engine._replies.clear()
        proxy.engine.enqueue(reply)
        answer = fuzz.send(path, json.dumps(body))
        assert answer.status_code in (200, 400, 502, 503) if faulty else answer.status_code == 200, answer.text
        answered = fuzz.well(path, answer)
        assert answered or faulty, answer.text
        (call,) = proxy.calls(fuzz.session)
        assert call["status"] == ("complete" if answered else "failed")
        if answered and not faulty:
            assert call["output_ids"] == list(reply.ids)[:50]
        if answered:
            assert (
                len(call["logprobs"])
                == len(call["output_ids"])
                == sum(end - start for _, start, end in call["version_spans"])
            )

    examine()
