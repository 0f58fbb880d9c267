"""A store on both databases."""

from collections.abc import Iterator

import pytest

from agentrl.store import Database


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()
