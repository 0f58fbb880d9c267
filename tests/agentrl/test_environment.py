"""What is secret in the environment."""

from __future__ import annotations

import pytest

from agentrl.environment import masked, without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db:5432/runs", "postgresql://me:***@db:5432/runs"),
        ("postgresql+psycopg://me:se%40cret@db/runs", "postgresql+psycopg://me:***@db/runs"),
        ("postgresql://:secret@db/runs", "postgresql://:***@db/runs"),
        ("postgresql://me:s:e/c@r\n@et@db/runs", "postgresql://me:***@db/runs"),
        ("me:secret@db/runs", "me:***@db/runs"),
        ("postgresql:///runs?host=db&password=secret&user=me", "postgresql:///runs?host=db&password=***&user=me"),
    ],
)
def test_a_database_url_is_printed_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url", ["postgresql://me@db:5432/runs", "postgresql://db/runs", "sqlite:////runs/a:b@c/agentrl.db", "nonsense"]
)
def test_a_database_url_without_a_password_is_printed_as_it_is(url: str) -> None:
    assert without_password(url) == url


def test_a_configuration_is_shown_without_its_secrets() -> None:
    config = {
        "agent_args": {"db_password": "p", "passwords": {"a": "p"}, "tokens": ["p"], "max_tokens": 7, "name": "n"},
        "proxy": {"upstreams": {"judge": {"base_url": "https://u:p@h/v1", "api_key_env": "JUDGE_KEY"}}, "port": 1},
        "secret": None,
    }
    assert masked(config) == {
        "agent_args": {
            "db_password": "***",
            "passwords": {"a": "***"},
            "tokens": ["***"],
            "max_tokens": 7,
            "name": "n",
        },
        "proxy": {"upstreams": {"judge": {"base_url": "https://u:***@h/v1", "api_key_env": "JUDGE_KEY"}}, "port": 1},
        "secret": None,
    }
