"""The tree of a session: its ancestors and descendants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from session_trees import trees

from agentrl.store.family import Family


@given(parents=trees)
def test_ancestors_and_descendants_match_the_parent_links(parents):
    def parent_of(i: int) -> int | None:
        return None if i == 0 else parents[i]

    def chain(i: int) -> list[str]:
        found, above = [], parent_of(i)
        while above is not None:
            found.append(str(above))
            above = parent_of(above)
        return found

    depth = {i: len(chain(i)) for i in range(len(parents))}
    rows: list[Any] = [
        SimpleNamespace(id=str(i), parent_session_id=None if i == 0 else str(parents[i]))
        for i in sorted(depth, key=lambda i: (depth[i], str(i)))
    ]
    tree = Family(rows)
    for i in depth:
        assert [row.id for row in tree.above(str(i))] == chain(i)
        below = [row.id for row in tree.below(str(i))]
        assert sorted(below) == sorted(str(j) for j in depth if str(i) in chain(j))
        assert [depth[int(j)] for j in below] == sorted(depth[int(j)] for j in below)
