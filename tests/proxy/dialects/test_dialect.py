"""What the dialects refuse alike."""

import json
from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.dialects import DIALECTS
from agentrl.store.sessions.areal_sessions import RESPONSE_IDS

HI = [{"role": "user", "content": "a"}]
LEAST: dict[str, dict[str, Any]] = {
    "openai.chat": {"messages": HI},
    "openai.completions": {"prompt": "a"},
    "openai.responses": {"input": "a"},
    "anthropic.messages": {"model": "m", "max_tokens": 9, "messages": HI},
}
BODIES = {
    "integer": b'{"tools": [{"a": %d}]}' % 10**30,
    "depth": b'{"tools": [%s1%s]}' % (b'{"a":' * 500, b"}" * 500),
    "syntax": b"{",
    "encoding": b'{"tools": [{"a": "\xff"}]}',
    "kind": b"[]",
}
START = {
    "openai.chat": b'{"messages": [{"role": "user", "content": "a"}],',
    "openai.responses": b'{"input": "a",',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("dialect", [d for d in DIALECTS.values() if d.name in START], ids=lambda d: d.name)
def test_a_body_that_cannot_be_read_and_written_again_is_a_400(dialect, body):
    if body.startswith(b'{"'):
        body = START[dialect.name] + body[1:]
    with pytest.raises(RequestError) as caught:
        dialect.decode(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.name)
def test_an_unknown_parameter_that_is_null_is_absent_and_any_other_is_refused(dialect):
    body = LEAST[dialect.name]
    plain, spelled = (dialect.decode(json.dumps(body | more).encode()) for more in ({}, {"moderation": None}))
    assert spelled == plain
    with pytest.raises(RequestError) as caught:
        dialect.decode(json.dumps(body | {"moderation": None, "moderated": False}).encode())
    assert (caught.value.status, caught.value.param) == (400, "moderated")


def test_areals_export_knows_the_response_ids_of_every_dialect():
    assert RESPONSE_IDS.keys() == {dialect.name for dialect in DIALECTS.values()}
