"""What a session's key may ask of an engine: extremes are refused by name, in every dialect, before an engine hears."""

from __future__ import annotations

from typing import Any

import pytest

HELLO = [{"role": "user", "content": "ab"}]
BASES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO},
    "/completions": {"prompt": "ab"},
    "/responses": {"input": "ab"},
    "/messages": {"model": "test", "max_tokens": 5, "messages": HELLO},
}
BOMB = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}


def formats(schema: Any) -> dict[str, dict[str, Any]]:
    """A schema as each dialect asks for it."""
    named = {"name": "a", "schema": schema}
    return {
        "/chat/completions": {"response_format": {"type": "json_schema", "json_schema": named}},
        "/responses": {"text": {"format": {"type": "json_schema", **named}}},
        "/messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }


EXTREMES: list[tuple[str, dict[str, Any], str]] = [
    *[(path, {"top_k": 2**31}, "top_k") for path in ("/chat/completions", "/completions", "/messages")],
    *[(path, {"logit_bias": {"9" * 5000: 1}}, "logit_bias") for path in ("/chat/completions", "/completions")],
    *[(path, {"stop": ["x" * 200_000]}, "stop") for path in ("/chat/completions", "/completions")],
    ("/messages", {"stop_sequences": ["x" * 200_000]}, "stop_sequences"),
    *[
        (path, body, next(iter(body)))
        for schema in ({"$ref": "#"}, {"type": "nonsense"}, {"enum": list(range(5000))}, BOMB)
        for path, body in formats(schema).items()
    ],
]


@pytest.mark.parametrize(("path", "extreme", "param"), EXTREMES)
def test_an_extreme_is_refused_by_name(proxy, path, extreme, param):
    session = proxy.session(sampling={"temperature": 1.0})
    answer = proxy.http.post(
        session["base_url"] + path,
        json=BASES[path] | extreme,
        headers={"Authorization": f"Bearer {session['api_key']}"},
    )
    assert answer.status_code == 400, answer.text
    assert param in str(answer.json()["error"])
    assert len(answer.text) < 1000
    assert proxy.engine.requests == []


def test_the_sampling_of_an_evaluation_has_the_same_bounds(proxy):
    answer = proxy.post("/groups", {"is_eval": True, "task": {}, "sampling": {"top_k": 2**31}})
    assert answer.status_code == 422
    assert "top_k" in answer.text
