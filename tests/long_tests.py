"""`long_on("postgresql")`: a test's variant on this database is long; the one on the other stays in `make test`.

For slow tests. Where the database hardly matters to the rule, PostgreSQL is long. Where locks between processes are the
point, SQLite is, whose writers wait for each other anyway.
"""

from __future__ import annotations

import pytest
from databases import KINDS


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "long_on(kind): the variant on this kind of database is long")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark variants `long`. A marker without a variant, or for both of them, is a usage error."""
    for item in items:
        long = {str(kind) for mark in item.iter_markers("long_on") for kind in mark.args}
        if not long:
            continue
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        kinds = [value for value in params.values() if isinstance(value, str) and value in KINDS]
        if len(kinds) != 1 or not long < set(KINDS):
            raise pytest.UsageError(f"{item.nodeid}: long_on takes one of {KINDS}, on a test with a variant for each")
        if kinds[0] in long:
            item.add_marker(pytest.mark.long)
