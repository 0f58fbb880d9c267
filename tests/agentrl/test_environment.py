"""What is secret in the environment."""

from __future__ import annotations

import pytest

from agentrl.environment import STORAGE, masked, storage_variables, with_storage, without_password, without_secrets


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


def test_a_child_gets_no_access_to_the_object_storage() -> None:
    given = dict.fromkeys(STORAGE, "x") | {"AWS_CONTAINER_AUTHORIZATION_TOKEN": "x", "PATH": "/bin"}
    assert without_secrets(given) == {"PATH": "/bin"}
    assert storage_variables(given).keys() == given.keys() - {"PATH"}


@pytest.mark.parametrize(
    ("first", "merged"),
    [
        ({}, {"AWS_ACCESS_KEY_ID": "host", "AWS_SESSION_TOKEN": "host"}),
        (
            {"AWS_ENDPOINT_URL": "run"},
            {"AWS_ACCESS_KEY_ID": "host", "AWS_SESSION_TOKEN": "host", "AWS_ENDPOINT_URL": "run"},
        ),
        ({"AWS_ACCESS_KEY_ID": "run", "PATH": "/bin"}, {"AWS_ACCESS_KEY_ID": "run"}),
        ({"AWS_PROFILE": "run"}, {"AWS_PROFILE": "run"}),
    ],
)
def test_a_key_or_a_profile_is_not_mixed_with_those_of_another_environment(
    first: dict[str, str], merged: dict[str, str]
) -> None:
    host = {"AWS_ACCESS_KEY_ID": "host", "AWS_SESSION_TOKEN": "host", "PATH": "/usr/bin"}
    assert with_storage(first, host) == merged
