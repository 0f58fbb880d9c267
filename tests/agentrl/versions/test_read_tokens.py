"""Read tokens: for a version and older ones, until a time, under one key."""

from __future__ import annotations

import pytest

from agentrl.versions.read_tokens import is_read_token, read_token

TOKEN = read_token("key", "v12-a", 1000)


@pytest.mark.parametrize(
    ("token", "key", "name", "now", "reads"),
    [
        (TOKEN, "key", "v12-a", 999.5, True),
        (TOKEN, "key", "v3-b", 1000, True),
        (TOKEN, "key", "v13-a", 999, False),
        (TOKEN, "key", "v12-a", 1001, False),
        (TOKEN, "other", "v12-a", 999, False),
        (TOKEN.replace("1000", "9000"), "key", "v12-a", 999, False),
        (TOKEN.replace("v12", "v99"), "key", "v12-a", 999, False),
        (TOKEN, "key", "weights", 999, False),
        (read_token("key", "*", 1000), "key", "v1-a", 999, False),
        ("", "key", "v12-a", 999, False),
        ("1.v12-a", "key", "v12-a", 0, False),
        ("٣.v12-a.ab", "key", "v12-a", 0, False),
        ("9" * 5000 + ".v12-a.ab", "key", "v12-a", 0, False),
        ("x.v12-a.ab", "key", "v12-a", 0, False),
    ],
    ids=range(14),
)
def test_what_a_token_reads(token: str, key: str, name: str, now: float, reads: bool) -> None:
    assert is_read_token(token, key, name, now) is reads
